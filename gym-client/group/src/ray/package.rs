//! The files of a job as a zip, which Ray unpacks on the nodes.

use std::io::{Cursor, Read as _, Write as _};
use std::path::Path;

use bytes::Bytes;
use gym_core::{Error, Result};
use zip::write::{SimpleFileOptions, ZipWriter};
use zip::{CompressionMethod, DateTime};

/// The entry point of a job.
pub(super) const SHIM: &str = include_str!("shim.py");
/// The name of the entry point in the package.
pub(super) const SHIM_FILE: &str = "gym_ray.py";
/// The name of the program in the package.
pub(super) const PROGRAM_FILE: &str = "gym_program";

/// A package, and the name that Ray stores it under.
#[derive(Debug)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) zip: Bytes,
}

impl Package {
    /// Packs the entry point, and the program at `program` if it is to be sent. The same files give the same package.
    pub(super) fn pack(program: Option<&Path>) -> Result<Self> {
        let failed = |error: Box<dyn std::error::Error + Send + Sync>| {
            Error::internal("pack the program for Ray").caused_by(error)
        };
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        // The earliest time of the format: that of the file would make another package of the same content.
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Deflated)
            .compression_level(Some(1))
            .last_modified_time(DateTime::default());
        zip.start_file(SHIM_FILE, options.unix_permissions(0o644)).map_err(|error| failed(error.into()))?;
        zip.write_all(SHIM.as_bytes()).map_err(|error| failed(error.into()))?;
        if let Some(program) = program {
            let mut file = std::fs::File::open(program).map_err(|error| failed(error.into()))?;
            zip.start_file(PROGRAM_FILE, options.unix_permissions(0o755)).map_err(|error| failed(error.into()))?;
            let mut block = vec![0; 1 << 20];
            loop {
                match file.read(&mut block).map_err(|error| failed(error.into()))? {
                    0 => break,
                    read => zip.write_all(&block[..read]).map_err(|error| failed(error.into()))?,
                }
            }
        }
        let zip = zip.finish().map_err(|error| failed(error.into()))?.into_inner();
        let name = format!("_ray_pkg_{}.zip", sha1_smol::Sha1::from(&zip).digest());
        Ok(Self { name, zip: zip.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_program_gives_the_same_package_and_stays_executable() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        std::fs::write(&program, vec![7; 3 << 20]).unwrap();
        let first = Package::pack(Some(&program)).unwrap();
        std::fs::write(&program, vec![7; 3 << 20]).unwrap();
        let again = Package::pack(Some(&program)).unwrap();
        assert_eq!((&first.name, &first.zip), (&again.name, &again.zip));
        std::fs::write(&program, vec![8; 3 << 20]).unwrap();
        assert_ne!(Package::pack(Some(&program)).unwrap().name, first.name);
        let mut zip = zip::ZipArchive::new(Cursor::new(first.zip)).unwrap();
        assert_eq!(zip.by_name(PROGRAM_FILE).unwrap().unix_mode().map(|mode| mode & 0o777), Some(0o755));
        assert_eq!(zip.len(), 2);
        assert_eq!(zip::ZipArchive::new(Cursor::new(Package::pack(None).unwrap().zip)).unwrap().len(), 1);
    }
}
