//! The columns that a multimodal model takes beside its tokens.

use crate::base::error::{Error, Result};
use crate::group::batch::tensor::DType;
use crate::group::batch::{Batch, Column};

/// Dense columns that belong to the media.
const TOKEN_TYPES: [&str; 2] = ["token_type_ids", "mm_token_type_ids"];
/// Columns of pixels, which may be taken in a narrower type.
const PIXELS: [&str; 2] = ["pixel_values", "pixel_values_videos"];
/// Columns whose rows must have as many segments each: pixels and what says how they lie.
const COUPLED: [(&str, &str); 4] = [
    ("pixel_values", "image_grid_thw"),
    ("pixel_values", "imgs_sizes"),
    ("pixel_values", "num_frames"),
    ("pixel_values_videos", "video_grid_thw"),
];

impl Batch {
    /// The packed columns, `token_type_ids` and `mm_token_type_ids`; shared, but for pixels that are to be of another float type.
    ///
    /// # Errors
    /// `InvalidArgument` when pixels and their sizes do not have as many segments in each row, or pixels are no floats.
    pub fn media(&self, pixels: Option<DType>) -> Result<Self> {
        let mut media = Self::empty();
        for (name, column) in self.columns() {
            let column = match (column, pixels) {
                (Column::Packed(packed), Some(dtype)) if PIXELS.contains(&name) => packed.to_float(dtype)?.into(),
                (Column::Packed(_), _) => column.clone(),
                (Column::Dense(_), _) if TOKEN_TYPES.contains(&name) => column.clone(),
                _ => continue,
            };
            media.insert(name, column)?;
        }
        for (pixels, sizes) in COUPLED {
            if let (Some(Column::Packed(left)), Some(Column::Packed(right))) = (media.get(pixels), media.get(sizes)) {
                left.check_coupled(right).map_err(|error: Error| error.about(format!("{pixels:?} and {sizes:?}")))?;
            }
        }
        Ok(media)
    }
}
