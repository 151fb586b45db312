//! The header of a qcow2 file (QEMU's `docs/interop/qcow2.txt`): read, checked, and given another backing file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub const MAGIC: u32 = 0x5146_49fb;
const LENGTH: usize = 104; // bytes of a version 3 header without extensions
const EXTENSION_END: u32 = 0;
const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const MAX_BACKING_NAME: usize = 1023; // bytes, a limit of the format
const MAX_SIZE: u64 = 1 << 46; // 64 TiB, far above what an L1 table of ours covers

const SIZE_AT: u64 = 24;
const L1_SIZE_AT: u64 = 36;
const L1_OFFSET_AT: u64 = 40;
const AUTOCLEAR_AT: u64 = 88;

const DIRTY: u64 = 1;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    pub version: u32,
    pub cluster_bits: u32,
    /// Of the virtual disk, in bytes.
    pub size: u64,
    pub l1_size: u32,
    pub l1_offset: u64,
    pub refcount_table_offset: u64,
    pub refcount_table_clusters: u32,
    pub refcount_order: u32,
    pub snapshots: u32,
    pub incompatible: u64,
    pub autoclear: u64,
    /// Bytes until the extensions.
    pub length: usize,
    pub backing: Option<PathBuf>,
    pub backing_format: Option<String>,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

pub fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

impl Header {
    /// Reads and checks the header of `path`, open as `file`.
    pub fn read(file: &File, path: &Path) -> io::Result<Header> {
        let mut first = vec![0; 65536];
        let length = read_up_to(file, &mut first, 0)?;
        Header::parse(&first[..length], path)
            .map_err(|why| invalid(format!("{} is not a usable qcow2 image: {why}", path.display())))
    }

    /// `bytes` is the beginning of the file `path`; relative names are relative to its folder.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Header, String> {
        if bytes.len() < LENGTH || u32_at(bytes, 0) != MAGIC {
            return Err("wrong magic".into());
        }
        let version = u32_at(bytes, 4);
        if version != 2 && version != 3 {
            return Err(format!("version {version}"));
        }
        let cluster_bits = u32_at(bytes, 20);
        if !(12..=21).contains(&cluster_bits) {
            return Err(format!("clusters of 2^{cluster_bits} bytes are not supported"));
        }
        let new = version == 3;
        let header = Header {
            version,
            cluster_bits,
            size: u64_at(bytes, 24),
            l1_size: u32_at(bytes, 36),
            l1_offset: u64_at(bytes, 40),
            refcount_table_offset: u64_at(bytes, 48),
            refcount_table_clusters: u32_at(bytes, 56),
            snapshots: u32_at(bytes, 60),
            incompatible: if new { u64_at(bytes, 72) } else { 0 },
            autoclear: if new { u64_at(bytes, 88) } else { 0 },
            refcount_order: if new { u32_at(bytes, 96) } else { 4 },
            length: if new { u32_at(bytes, 100) as usize } else { 72 },
            backing: None,
            backing_format: None,
        };
        if header.length < 72 || header.length > bytes.len() {
            return Err("the header's length is wrong".into());
        }
        if u32_at(bytes, 32) != 0 {
            return Err("it is encrypted".into());
        }
        if header.incompatible & !DIRTY != 0 {
            return Err(format!("it has features that are not supported ({:#x})", header.incompatible));
        }
        if header.size > MAX_SIZE {
            return Err(format!("a disk of {} bytes", header.size));
        }
        let covered = u64::from(header.l1_size) << (2 * cluster_bits - 3);
        if covered < header.size {
            return Err("its L1 table is too small".into());
        }
        let cluster = 1u64 << cluster_bits;
        if header.l1_offset % cluster != 0 || header.refcount_table_offset % cluster != 0 {
            return Err("a table is not aligned".into());
        }
        let name_at = u64_at(bytes, 8);
        let name_length = u32_at(bytes, 16) as usize;
        let backing = if name_at == 0 {
            None
        } else {
            let end = (name_at as usize).checked_add(name_length).filter(|end| *end <= bytes.len());
            let (Some(end), true) = (end, name_length <= MAX_BACKING_NAME) else {
                return Err("the backing file's name is outside the header".into());
            };
            let name =
                std::str::from_utf8(&bytes[name_at as usize..end]).map_err(|_| "the backing file's name")?;
            Some(path.parent().unwrap_or(Path::new("/")).join(name))
        };
        let format = extensions(bytes, &header, name_at as usize)?
            .into_iter()
            .find(|(kind, _)| *kind == EXTENSION_BACKING_FORMAT)
            .map(|(_, data)| String::from_utf8_lossy(&data).into_owned());
        Ok(Header { backing, backing_format: format, ..header })
    }

    pub fn dirty(&self) -> bool {
        self.incompatible & DIRTY != 0
    }
}

/// Header extensions as (type, data), without the end marker.
fn extensions(bytes: &[u8], header: &Header, name_at: usize) -> Result<Vec<(u32, Vec<u8>)>, String> {
    let end = if name_at != 0 { name_at.min(bytes.len()) } else { bytes.len() };
    let mut found = Vec::new();
    let mut at = header.length;
    while at + 8 <= end {
        let (kind, length) = (u32_at(bytes, at), u32_at(bytes, at + 4) as usize);
        if kind == EXTENSION_END {
            break;
        }
        let Some(data) =
            length.checked_add(at + 8).filter(|stop| *stop <= end).map(|stop| &bytes[at + 8..stop])
        else {
            return Err("a header extension is outside the header".into());
        };
        found.push((kind, data.to_vec()));
        at += 8 + length.div_ceil(8) * 8;
    }
    Ok(found)
}

/// The beginning of the file with another backing file; everything else that it says stays.
fn with_backing(bytes: &[u8], path: &Path, backing: &Path, format: &str) -> Result<Vec<u8>, String> {
    let header = Header::parse(bytes, path)?;
    let name = backing.as_os_str().as_encoded_bytes();
    if name.len() > MAX_BACKING_NAME {
        return Err(format!("the name of {} is too long", backing.display()));
    }
    let old_name_at = u64_at(bytes, 8) as usize;
    let old_end = (old_name_at + u32_at(bytes, 16) as usize).max(header.length);
    let mut out = bytes[..header.length].to_vec();
    let kept = extensions(bytes, &header, old_name_at)?
        .into_iter()
        .filter(|(kind, _)| *kind != EXTENSION_BACKING_FORMAT);
    for (kind, data) in std::iter::once((EXTENSION_BACKING_FORMAT, format.as_bytes().to_vec())).chain(kept) {
        out.extend(kind.to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(&data);
        out.resize(out.len().div_ceil(8) * 8, 0);
    }
    out.extend([0; 8]);
    let name_at = out.len() as u64;
    out.extend(name);
    if out.len() > 1 << header.cluster_bits {
        return Err("the header has no room for the backing file's name".into());
    }
    out[8..16].copy_from_slice(&name_at.to_be_bytes());
    out[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
    if out.len() < old_end {
        out.resize(old_end, 0);
    }
    Ok(out)
}

/// Name another backing file in the header of `file`. One write: a crash leaves the old name or the new one.
pub fn write_backing(file: &File, path: &Path, backing: &Path, format: &str) -> io::Result<()> {
    let mut first = vec![0; 65536];
    let length = read_up_to(file, &mut first, 0)?;
    let out = with_backing(&first[..length], path, backing, format)
        .map_err(|why| invalid(format!("{}: {why}", path.display())))?;
    file.write_all_at(&out, 0)
}

pub fn write_size(file: &File, size: u64) -> io::Result<()> {
    file.write_all_at(&size.to_be_bytes(), SIZE_AT)
}

/// Where the L1 table is and how many entries it has, in one write.
pub fn write_l1(file: &File, entries: u32, offset: u64) -> io::Result<()> {
    let mut bytes = entries.to_be_bytes().to_vec();
    bytes.extend(offset.to_be_bytes());
    debug_assert_eq!(L1_SIZE_AT + 4, L1_OFFSET_AT);
    file.write_all_at(&bytes, L1_SIZE_AT)
}

/// Say that features which would have to be kept up to date (bitmaps, say) no longer are.
pub fn clear_autoclear(file: &File) -> io::Result<()> {
    file.write_all_at(&[0; 8], AUTOCLEAR_AT)
}

/// Reads until `buffer` is full or the file ends; how much there was.
pub fn read_up_to(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `aenv.storage.qcow2.encode_overlay` writes it.
    fn sample(backing: &str) -> Vec<u8> {
        let mut out = vec![0u8; 65536];
        out[..4].copy_from_slice(&MAGIC.to_be_bytes());
        out[4..8].copy_from_slice(&3u32.to_be_bytes());
        out[20..24].copy_from_slice(&16u32.to_be_bytes());
        out[24..32].copy_from_slice(&(1u64 << 30).to_be_bytes());
        out[36..40].copy_from_slice(&2u32.to_be_bytes());
        out[40..48].copy_from_slice(&(3u64 << 16).to_be_bytes());
        out[48..56].copy_from_slice(&(1u64 << 16).to_be_bytes());
        out[56..60].copy_from_slice(&1u32.to_be_bytes());
        out[96..100].copy_from_slice(&4u32.to_be_bytes());
        out[100..104].copy_from_slice(&104u32.to_be_bytes());
        with_backing(&out, Path::new("/x/a"), Path::new(backing), "raw").unwrap()
    }

    #[test]
    fn backing_can_be_replaced_by_longer_and_shorter_names() {
        let first = sample("/layers/base");
        for name in ["/a", "/layers/a/much/longer/name/than/before.qcow2", "relative.qcow2"] {
            let changed = with_backing(&first, Path::new("/x/a"), Path::new(name), "qcow2").unwrap();
            let header = Header::parse(
                &{
                    let mut b = changed.clone();
                    b.resize(65536, 0);
                    b
                },
                Path::new("/x/a"),
            )
            .unwrap();
            assert_eq!(header.backing.unwrap(), Path::new("/x").join(name));
            assert_eq!(header.backing_format.as_deref(), Some("qcow2"));
            assert!(changed.len() >= first.len().min(changed.len()));
        }
    }

    #[test]
    fn damaged_headers_are_refused_and_never_panic() {
        let good = {
            let mut b = sample("/layers/base");
            b.resize(4096, 0);
            b
        };
        assert!(Header::parse(&good, Path::new("/x/a")).is_ok());
        for cut in 0..200 {
            let _ = Header::parse(&good[..cut], Path::new("/x/a"));
        }
        let mut state = 1u64;
        for _ in 0..20_000 {
            let mut bad = good.clone();
            for _ in 0..3 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                bad[(state >> 33) as usize % 160] = (state >> 20) as u8;
            }
            let _ = Header::parse(&bad, Path::new("/x/a"));
        }
    }
}
