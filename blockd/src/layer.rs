//! One file of a chain, and what it says of a part of the disk: data at a position, zeros, or nothing.
//!
//! L2 tables are cached in slices of 512 entries, as much of the disk as 32 MiB in clusters of 64 KiB. A slice without
//! entries takes no memory, and most of those of a thin layer have none.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::header::{invalid, read_up_to, Header};

pub const OFFSET: u64 = (1 << 56) - (1 << 9);
pub const COPIED: u64 = 1 << 63;
pub const COMPRESSED: u64 = 1 << 62;
pub const ZERO: u64 = 1;

pub const SLICE: u64 = 512; // entries
const MAX_SLICES: usize = 1024; // 4 MiB of memory for one layer, 32 GiB of disk

/// An open file that reads in flight keep open.
pub struct Handle {
    pub file: File,
    pub path: PathBuf,
    /// Whether the page cache cannot be read without waiting.
    pub waits: Cell<bool>,
}

impl Handle {
    pub fn new(file: File, path: &Path) -> Rc<Handle> {
        Rc::new(Handle { file, path: path.to_path_buf(), waits: Cell::new(false) })
    }

    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// What a file holds of a part of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    Nothing,
    Zero,
    /// Position in the file.
    Data(u64),
}

pub struct Qcow {
    pub handle: Rc<Handle>,
    pub header: Header,
    pub l1: Vec<u64>,
    slices: RefCell<HashMap<u64, Option<Box<[u64; SLICE as usize]>>>>,
}

impl Qcow {
    pub fn open(file: File, path: &Path) -> io::Result<Qcow> {
        let header = Header::read(&file, path)?;
        let mut bytes = vec![0; header.l1_size as usize * 8];
        if read_up_to(&file, &mut bytes, header.l1_offset)? != bytes.len() {
            return Err(invalid(format!("{}: its L1 table is cut off", path.display())));
        }
        let l1 = bytes.chunks_exact(8).map(|b| u64::from_be_bytes(b.try_into().expect("8 bytes"))).collect();
        let handle = Handle::new(file, path);
        Ok(Qcow { handle, header, l1, slices: RefCell::new(HashMap::new()) })
    }

    pub fn cluster(&self) -> u64 {
        1 << self.header.cluster_bits
    }

    /// Entries of one L2 table.
    pub fn per_table(&self) -> u64 {
        1 << (self.header.cluster_bits - 3)
    }

    /// Where in the file the L2 table of a cluster is; None when there is none.
    pub fn table(&self, cluster: u64) -> Option<u64> {
        let entry = self.l1.get((cluster / self.per_table()) as usize)?;
        Some(entry & OFFSET).filter(|offset| *offset != 0)
    }

    /// The L2 entry of a cluster of the disk, 0 when there is no table.
    pub fn entry(&self, cluster: u64) -> io::Result<u64> {
        let Some(table) = self.table(cluster) else { return Ok(0) };
        let number = cluster / SLICE;
        let mut slices = self.slices.borrow_mut();
        if let Some(known) = slices.get(&number) {
            return Ok(known.as_ref().map_or(0, |slice| slice[(cluster % SLICE) as usize]));
        }
        let mut bytes = [0; SLICE as usize * 8];
        let at = table + (number * SLICE % self.per_table()) * 8;
        if read_up_to(&self.handle.file, &mut bytes, at)? != bytes.len() {
            return Err(invalid(format!("{}: an L2 table is outside the file", self.handle.path.display())));
        }
        let slice = bytes.iter().any(|byte| *byte != 0).then(|| {
            let mut entries = Box::new([0; SLICE as usize]);
            for (entry, raw) in entries.iter_mut().zip(bytes.chunks_exact(8)) {
                *entry = u64::from_be_bytes(raw.try_into().expect("8 bytes"));
            }
            entries
        });
        let found = slice.as_ref().map_or(0, |slice| slice[(cluster % SLICE) as usize]);
        if slices.len() >= MAX_SLICES {
            slices.clear(); // crude, and as rare as a guest that reads all over more than 32 GiB
        }
        slices.insert(number, slice);
        Ok(found)
    }

    /// Set L2 entries of consecutive clusters that have a table, in the file and in the cache.
    pub fn set_entries(&self, first: u64, entries: &[u64]) -> io::Result<()> {
        let mut done = 0;
        while done < entries.len() {
            let cluster = first + done as u64;
            let count = (entries.len() - done).min((SLICE - cluster % SLICE) as usize);
            let part = &entries[done..done + count];
            let table = self.table(cluster).expect("the table was made before");
            let mut bytes = Vec::with_capacity(count * 8);
            part.iter().for_each(|entry| bytes.extend(entry.to_be_bytes()));
            self.handle.file.write_all_at(&bytes, table + cluster % self.per_table() * 8)?;
            if let Some(slice) = self.slices.borrow_mut().get_mut(&(cluster / SLICE)) {
                let slice = slice.get_or_insert_with(|| Box::new([0; SLICE as usize]));
                let from = (cluster % SLICE) as usize;
                slice[from..from + count].copy_from_slice(part);
            }
            done += count;
        }
        Ok(())
    }

    /// What the file holds at `offset` of the disk, which is inside it, and for how many bytes that is the same.
    pub fn extent(&self, offset: u64) -> io::Result<(Extent, u64)> {
        let size = self.cluster();
        let entry = self.entry(offset / size)?;
        Ok((self.meaning(entry, offset % size)?, size - offset % size))
    }

    fn meaning(&self, entry: u64, inside: u64) -> io::Result<Extent> {
        if entry & COMPRESSED != 0 {
            return Err(invalid(format!(
                "{}: compressed clusters are not supported",
                self.handle.path.display()
            )));
        }
        if entry & ZERO != 0 && self.header.version >= 3 {
            return Ok(Extent::Zero);
        }
        match entry & OFFSET {
            0 => Ok(Extent::Nothing),
            host if host % self.cluster() == 0 => Ok(Extent::Data(host + inside)),
            _ => Err(invalid(format!("{}: an L2 entry is not aligned", self.handle.path.display()))),
        }
    }
}

/// A file below the one that is written: nobody changes it.
pub enum Layer {
    Qcow(Qcow),
    Raw { handle: Rc<Handle>, size: u64 },
}

impl Layer {
    pub fn handle(&self) -> &Rc<Handle> {
        match self {
            Layer::Qcow(qcow) => &qcow.handle,
            Layer::Raw { handle, .. } => handle,
        }
    }

    /// Bytes of disk that it describes.
    pub fn size(&self) -> u64 {
        match self {
            Layer::Qcow(qcow) => qcow.header.size,
            Layer::Raw { size, .. } => *size,
        }
    }

    fn extent(&self, offset: u64) -> io::Result<(Extent, u64)> {
        match self {
            Layer::Qcow(qcow) => qcow.extent(offset),
            Layer::Raw { size, .. } => Ok((Extent::Data(offset), size - offset)),
        }
    }
}

pub const MAX_CHAIN: usize = 255;

/// Open a file and all below it, top first. `format` is what the file above says of it.
pub fn open_chain(path: &Path, format: &str) -> io::Result<Vec<Rc<Layer>>> {
    let mut layers = Vec::new();
    let mut next = Some((path.to_path_buf(), format.to_string()));
    while let Some((path, format)) = next.take() {
        if layers.len() >= MAX_CHAIN {
            return Err(invalid(format!("the chain is deeper than {MAX_CHAIN}, or loops")));
        }
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let file = File::open(&path).map_err(named)?;
        let layer = match format.as_str() {
            "raw" => {
                let size = crate::system::length(&file).map_err(named)?;
                Layer::Raw { handle: Handle::new(file, &path), size }
            }
            "qcow2" => {
                let qcow = Qcow::open(file, &path)?;
                next = below(&qcow.header, &path)?;
                Layer::Qcow(qcow)
            }
            other => {
                return Err(invalid(format!("{}: the format {other:?} is not supported", path.display())))
            }
        };
        layers.push(Rc::new(layer));
    }
    Ok(layers)
}

/// The backing file and its format. The format is never guessed: a guest could make its raw disk look like an image
/// that names a file of the host.
pub fn below(header: &Header, path: &Path) -> io::Result<Option<(PathBuf, String)>> {
    match (&header.backing, &header.backing_format) {
        (None, _) => Ok(None),
        (Some(backing), Some(format)) => Ok(Some((backing.clone(), format.clone()))),
        (Some(_), None) => {
            Err(invalid(format!("{} does not say of what format its backing file is", path.display())))
        }
    }
}

/// Where a part of a request is read from.
pub struct Segment {
    /// Bytes from the beginning of the request.
    pub at: u64,
    pub length: u64,
    /// None: zeros.
    pub source: Option<(Rc<Handle>, u64)>,
}

/// Which parts of which files `length` bytes at `offset` are, looking through `layers` from the first on; what goes
/// together is joined. `at` is added to each segment's own.
pub fn resolve(
    layers: &[Rc<Layer>],
    offset: u64,
    length: u64,
    at: u64,
    out: &mut Vec<Segment>,
) -> io::Result<()> {
    let mut done = 0;
    while done < length {
        let position = offset + done;
        let mut count = length - done;
        let mut source = None;
        for layer in layers {
            if position >= layer.size() {
                break; // below it is nothing that may be seen
            }
            let (extent, same) = layer.extent(position)?;
            count = count.min(same).min(layer.size() - position);
            match extent {
                Extent::Nothing => continue,
                Extent::Zero => {}
                Extent::Data(host) => source = Some((layer.handle().clone(), host)),
            }
            break;
        }
        push(out, Segment { at: at + done, length: count, source });
        done += count;
    }
    Ok(())
}

/// Add a segment, or make the last one longer.
pub fn push(out: &mut Vec<Segment>, segment: Segment) {
    if let Some(last) = out.last_mut() {
        let together = last.at + last.length == segment.at
            && match (&last.source, &segment.source) {
                (None, None) => true,
                (Some((a, x)), Some((b, y))) => Rc::ptr_eq(a, b) && x + last.length == *y,
                _ => false,
            };
        if together {
            last.length += segment.length;
            return;
        }
    }
    out.push(segment);
}
