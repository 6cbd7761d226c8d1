//! The media columns of a batch, which a multimodal model takes in addition to its tokens.

use crate::base::error::{Error, Result};
use crate::group::batch::tensor::DType;
use crate::group::batch::{Batch, Column};

/// Dense columns that belong to the media.
const TOKEN_TYPES: [&str; 2] = ["token_type_ids", "mm_token_type_ids"];
/// Pixel columns, which can be converted to a narrower type.
const PIXELS: [&str; 2] = ["pixel_values", "pixel_values_videos"];
/// Pairs of columns whose rows must have the same number of segments: pixels, and the description of their layout.
const COUPLED: [(&str, &str); 4] = [
    ("pixel_values", "image_grid_thw"),
    ("pixel_values", "imgs_sizes"),
    ("pixel_values", "num_frames"),
    ("pixel_values_videos", "video_grid_thw"),
];

impl Batch {
    /// Returns the packed columns, `token_type_ids` and `mm_token_type_ids`. They share the memory, except pixels that `pixels`
    /// converts to another float type.
    ///
    /// # Errors
    /// `InvalidArgument` if pixels and their sizes have different numbers of segments in a row, or if pixels are not floats.
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
