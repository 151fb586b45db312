//! The file on top of a chain, which is written to.
//!
//! Every change goes to the file (the page cache) before the request that made it is acknowledged, in this order: the
//! clusters are counted, then written, then an L2 entry names them. So a daemon that is killed loses nothing that was
//! acknowledged, and leaves at worst clusters that are counted and not used (`qemu-img check`: leaks). Nothing is
//! synced to the disk; a power loss may leave anything, as with QEMU's `no-flush`.

use std::collections::{BTreeSet, VecDeque};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::header::{self, invalid, read_up_to};
use crate::layer::{Qcow, COPIED, OFFSET, ZERO};
use crate::system;

const L1_MAX: u64 = 1 << 22; // entries: 2 PiB of disk in clusters of 64 KiB

pub struct Active {
    pub qcow: Qcow,
    /// How often each cluster of the file is used: 0 or 1 in files of ours.
    counts: Vec<u16>,
    /// Positions of the blocks of counts.
    blocks: Vec<u64>,
    /// The first cluster of which neither this nor a later one is used.
    end: u64,
    /// Clusters below `end` that may be used, and may have old contents.
    free: BTreeSet<u64>,
    /// Clusters that are free once no read is under way that began before the number beside them.
    limbo: VecDeque<(u64, u64)>,
}

impl Active {
    /// Opens `path` to write to it. The lock keeps two daemons from doing that.
    pub fn open(path: &Path) -> io::Result<Active> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(named)?;
        lock(&file).map_err(named)?;
        let qcow = Qcow::open(file, path)?;
        let header = &qcow.header;
        let bad = |why: &str| Err(invalid(format!("{} cannot be written to: {why}", path.display())));
        if header.version != 3 {
            return bad("only version 3 can");
        }
        if header.dirty() {
            return bad("its reference counts are out of date; run: qemu-img check -r leaks");
        }
        if header.snapshots != 0 {
            return bad("it has internal snapshots");
        }
        if header.refcount_order != 4 {
            return bad("its reference counts are not of 16 bits");
        }
        if header.autoclear != 0 {
            header::clear_autoclear(&qcow.handle.file)?;
        }
        let (counts, blocks) = read_counts(&qcow, path)?;
        let cluster = qcow.cluster();
        let length = system::length(&qcow.handle.file)?.div_ceil(cluster);
        let used = counts.iter().rposition(|count| *count != 0).map_or(0, |last| last as u64 + 1);
        let end = used.max(length);
        let free = (0..end).filter(|at| counts.get(*at as usize).copied().unwrap_or(0) == 0).collect();
        Ok(Active { qcow, counts, blocks, end, free, limbo: VecDeque::new() })
    }

    pub fn file(&self) -> &File {
        &self.qcow.handle.file
    }

    fn per_block(&self) -> u64 {
        self.qcow.cluster() / 2
    }

    /// Clusters that follow each other in the file, between 1 and `wanted`: the first and how many. They read as zeros.
    pub fn allocate(&mut self, wanted: u64) -> io::Result<(u64, u64)> {
        if let Some(first) = self.free.first().copied() {
            let mut count = 1;
            while count < wanted && self.free.contains(&(first + count)) {
                count += 1;
            }
            let count = count.min(self.per_block() - first % self.per_block());
            if !self.has_block(first) {
                self.make_block(first)?;
            }
            self.clear(first, count)?;
            self.set_counts(first, count, 1)?;
            for at in first..first + count {
                self.free.remove(&at);
            }
            return Ok((first, count));
        }
        self.make_blocks()?;
        let first = self.end;
        let count = wanted.min(self.per_block() - first % self.per_block());
        self.set_counts(first, count, 1)?;
        self.end += count;
        Ok((first, count))
    }

    /// Give clusters of the file back. They are used again when all reads before number `reads` are done.
    pub fn release(&mut self, first: u64, count: u64, reads: u64) -> io::Result<()> {
        self.set_counts(first, count, 0)?;
        system::punch(self.file(), first * self.qcow.cluster(), count * self.qcow.cluster());
        self.limbo.extend((first..first + count).map(|at| (reads, at)));
        Ok(())
    }

    /// Reads before this number are done: what waited for them may be used again.
    pub fn settle(&mut self, oldest_read: u64) {
        while self.limbo.front().is_some_and(|(reads, _)| *reads <= oldest_read) {
            let (_, at) = self.limbo.pop_front().expect("looked at");
            self.free.insert(at);
        }
    }

    /// Make sure that a cluster of the disk has an L2 table.
    pub fn make_table(&mut self, cluster: u64) -> io::Result<()> {
        if self.qcow.table(cluster).is_some() {
            return Ok(());
        }
        let (at, _) = self.allocate(1)?;
        let position = at * self.qcow.cluster();
        if let Err(error) = self.file().write_all_at(&vec![0; self.qcow.cluster() as usize], position) {
            self.abandon(at, 1);
            return Err(error);
        }
        let number = cluster / self.qcow.per_table();
        let entry = position | COPIED;
        self.file().write_all_at(&entry.to_be_bytes(), self.qcow.header.l1_offset + number * 8)?;
        self.qcow.l1[number as usize] = entry;
        Ok(())
    }

    /// Take back clusters that nothing names; an error of that would only leak them.
    pub fn abandon(&mut self, first: u64, count: u64) {
        for at in first..first + count {
            if self.set_counts(at, 1, 0).is_ok() {
                self.free.insert(at);
            }
        }
    }

    /// Let the L1 table cover `size` bytes of disk, which the header does not say yet.
    pub fn cover(&mut self, size: u64) -> io::Result<()> {
        let needed = size.div_ceil(self.qcow.cluster() * self.qcow.per_table());
        let present = self.qcow.l1.len() as u64;
        if needed > L1_MAX {
            return Err(invalid(format!("a disk cannot have {size} bytes")));
        }
        if needed > present {
            let room = (present * 8).div_ceil(self.qcow.cluster()).max(1) * self.qcow.cluster() / 8;
            let offset = self.qcow.header.l1_offset;
            if needed <= room {
                let zeros = vec![0; (needed - present) as usize * 8];
                self.file().write_all_at(&zeros, offset + present * 8)?;
                header::write_l1(self.file(), needed as u32, offset)?;
            } else {
                self.move_l1(needed)?;
            }
            self.qcow.l1.resize(needed as usize, 0);
            self.qcow.header.l1_size = needed as u32;
        }
        Ok(())
    }

    /// Make the disk larger; the L1 table covers that already.
    pub fn set_size(&mut self, size: u64) -> io::Result<()> {
        header::write_size(self.file(), size)?;
        self.qcow.header.size = size;
        Ok(())
    }

    /// The file as a layer that nobody writes to any more.
    pub fn freeze(self) -> Qcow {
        unlock(self.file());
        self.qcow
    }

    /// Copy the L1 table to where it has more room, at the end of the file.
    fn move_l1(&mut self, entries: u64) -> io::Result<()> {
        let cluster = self.qcow.cluster();
        let clusters = (entries * 8).div_ceil(cluster);
        // They follow each other at the end of the file, within one block of counts.
        loop {
            self.make_blocks()?;
            let rest = self.per_block() - self.end % self.per_block();
            if rest >= clusters {
                break;
            }
            self.free.extend(self.end..self.end + rest);
            self.end += rest;
        }
        let first = self.end;
        self.set_counts(first, clusters, 1)?;
        self.end += clusters;
        let mut bytes: Vec<u8> = self.qcow.l1.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let (old, old_clusters) =
            (self.qcow.header.l1_offset / cluster, (bytes.len() as u64).div_ceil(cluster).max(1));
        bytes.resize((clusters * cluster) as usize, 0);
        self.file().write_all_at(&bytes, first * cluster)?;
        header::write_l1(self.file(), entries as u32, first * cluster)?;
        self.qcow.header.l1_offset = first * cluster;
        self.abandon(old, old_clusters);
        Ok(())
    }

    fn has_block(&self, cluster: u64) -> bool {
        self.blocks.get((cluster / self.per_block()) as usize).is_some_and(|block| *block != 0)
    }

    /// Make what is missing for clusters at the end of the file to be counted. May move the end.
    fn make_blocks(&mut self) -> io::Result<()> {
        while !self.has_block(self.end) {
            self.make_block(self.end)?;
        }
        Ok(())
    }

    /// Make a missing block of counts, which covers `cluster`, at the end of the file. It counts itself if it can.
    fn make_block(&mut self, cluster: u64) -> io::Result<()> {
        let number = (cluster / self.per_block()) as usize;
        let table = u64::from(self.qcow.header.refcount_table_clusters) * self.qcow.cluster() / 8;
        if number as u64 >= table {
            return Err(invalid("the file cannot become larger: its table of counts is full".into()));
        }
        while self.end / self.per_block() != number as u64 && !self.has_block(self.end) {
            self.make_block(self.end)?;
        }
        let at = self.end;
        let itself = at / self.per_block() == number as u64;
        let mut block = vec![0u8; self.qcow.cluster() as usize];
        if itself {
            let slot = (at % self.per_block()) as usize * 2;
            block[slot..slot + 2].copy_from_slice(&1u16.to_be_bytes());
        }
        let position = at * self.qcow.cluster();
        self.file().write_all_at(&block, position)?;
        if !itself {
            self.set_counts(at, 1, 1)?;
        }
        let entry = self.qcow.header.refcount_table_offset + number as u64 * 8;
        self.file().write_all_at(&position.to_be_bytes(), entry)?;
        if self.blocks.len() <= number {
            self.blocks.resize(number + 1, 0);
        }
        self.blocks[number] = position;
        self.remember(at, 1, 1);
        self.end += 1;
        Ok(())
    }

    /// Clusters that were used before read as zeros, as new ones do.
    fn clear(&self, first: u64, count: u64) -> io::Result<()> {
        let (offset, length) = (first * self.qcow.cluster(), count * self.qcow.cluster());
        if system::punch(self.file(), offset, length) {
            return Ok(());
        }
        self.file().write_all_at(&vec![0; length as usize], offset)
    }

    /// `count` clusters that have a block of counts, all the same one.
    fn set_counts(&mut self, first: u64, count: u64, value: u16) -> io::Result<()> {
        let block = self.blocks[(first / self.per_block()) as usize];
        let bytes = value.to_be_bytes().repeat(count as usize);
        self.file().write_all_at(&bytes, block + first % self.per_block() * 2)?;
        self.remember(first, count, value);
        Ok(())
    }

    fn remember(&mut self, first: u64, count: u64, value: u16) {
        let stop = (first + count) as usize;
        if self.counts.len() < stop {
            self.counts.resize(stop, 0);
        }
        self.counts[first as usize..stop].fill(value);
    }

    /// The cluster of the file that an L2 entry names.
    pub fn host_cluster(&self, entry: u64) -> Option<u64> {
        Some((entry & OFFSET) / self.qcow.cluster()).filter(|at| *at != 0)
    }

    /// Let clusters of the disk read as zeros, and give back what held them.
    pub fn zero(&mut self, first: u64, count: u64, reads: u64) -> io::Result<()> {
        let mut at = first;
        while at < first + count {
            let table_end = (at / self.qcow.per_table() + 1) * self.qcow.per_table();
            let stop = table_end.min(first + count);
            let entries =
                (at..stop).map(|cluster| self.qcow.entry(cluster)).collect::<io::Result<Vec<_>>>()?;
            if entries.iter().any(|entry| *entry != ZERO) {
                self.make_table(at)?;
                self.qcow.set_entries(at, &vec![ZERO; entries.len()])?;
                let held: Vec<u64> = entries.iter().filter_map(|entry| self.host_cluster(*entry)).collect();
                for (host, count) in runs(&held, self.per_block()) {
                    self.release(host, count, reads)?;
                }
            }
            at = stop;
        }
        Ok(())
    }
}

/// Consecutive numbers joined, none across a multiple of `boundary`.
fn runs(numbers: &[u64], boundary: u64) -> Vec<(u64, u64)> {
    let mut out: Vec<(u64, u64)> = Vec::new();
    for number in numbers {
        match out.last_mut() {
            Some((first, count)) if *first + *count == *number && number % boundary != 0 => *count += 1,
            _ => out.push((*number, 1)),
        }
    }
    out
}

fn read_counts(qcow: &Qcow, path: &Path) -> io::Result<(Vec<u16>, Vec<u64>)> {
    let cluster = qcow.cluster() as usize;
    let clusters = qcow.header.refcount_table_clusters as usize;
    if clusters == 0 || clusters > 64 {
        return Err(invalid(format!("{}: its table of counts has {clusters} clusters", path.display())));
    }
    let mut table = vec![0; clusters * cluster];
    read_up_to(&qcow.handle.file, &mut table, qcow.header.refcount_table_offset)?;
    let mut blocks: Vec<u64> =
        table.chunks_exact(8).map(|b| u64::from_be_bytes(b.try_into().expect("8 bytes")) & !511).collect();
    blocks.truncate(blocks.iter().rposition(|block| *block != 0).map_or(0, |last| last + 1));
    let mut counts = vec![0u16; blocks.len() * cluster / 2];
    let mut bytes = vec![0; cluster];
    for (number, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
        if read_up_to(&qcow.handle.file, &mut bytes, *block)? != cluster {
            return Err(invalid(format!("{}: a block of counts is cut off", path.display())));
        }
        for (count, raw) in counts[number * cluster / 2..].iter_mut().zip(bytes.chunks_exact(2)) {
            *count = u16::from_be_bytes([raw[0], raw[1]]);
        }
    }
    Ok((counts, blocks))
}

/// The bytes that QEMU locks when it writes to a file and lets nobody else do so (its block/file-posix.c: 100 + permission
/// says "I do this", 200 + permission "others may not"; permission 1 is writing).
const LOCKED: [i64; 2] = [101, 201];

/// Neither QEMU nor another of us opens what this has open to write.
fn lock(file: &File) -> io::Result<()> {
    for byte in LOCKED {
        if !set_lock(file, libc::F_WRLCK, byte) {
            return Err(invalid("another process writes to it".into()));
        }
    }
    Ok(())
}

fn unlock(file: &File) {
    for byte in LOCKED {
        set_lock(file, libc::F_UNLCK, byte);
    }
}

fn set_lock(file: &File, kind: libc::c_int, byte: i64) -> bool {
    use std::os::fd::AsRawFd;
    let range = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the structure outlives the call.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &range) == 0 }
}
