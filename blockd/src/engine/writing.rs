//! What a write does to a chain: which clusters it copies first, overwrites, makes, or lets read as zeros.

use std::io;
use std::os::unix::fs::FileExt;

use super::{Copied, Engine, Op, Reads, Request, PARTS, ZEROS};
use crate::layer::{resolve, Extent, COPIED, ZERO};

impl Engine {
    /// Read what clusters have of which the write is a part only, and which the top does not hold.
    pub(super) fn start_write(
        &mut self,
        io: &mut dyn Reads,
        id: u64,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        let cluster = self.top.qcow.cluster();
        let end = offset + length;
        let mut edges = vec![offset / cluster];
        edges.extend((length > 0).then(|| (end - 1) / cluster).filter(|last| *last != edges[0]));
        for at in edges {
            let (from, to) = (at * cluster, ((at + 1) * cluster).min(self.size()));
            if offset <= from && to <= end || self.top.qcow.extent(from)?.0 != Extent::Nothing {
                continue;
            }
            // What is written over need not be read.
            let mut segments = Vec::new();
            let (head, tail) = (offset.clamp(from, to), end.clamp(from, to));
            resolve(&self.below, from, head - from, 0, &mut segments)?;
            resolve(&self.below, tail, to - tail, tail - from, &mut segments)?;
            if segments.iter().all(|segment| segment.source.is_none()) {
                continue;
            }
            let mut data = vec![0; cluster as usize];
            let buffer = data.as_mut_ptr(); // the vector moves, its contents do not
            self.requests.get_mut(&id).expect("started").copies.push(Copied { cluster: at, data });
            self.fetch(io, id, segments, buffer)?;
        }
        let request = self.requests.get_mut(&id).expect("started");
        if request.pending > 0 {
            request.marked = true;
            for copy in &request.copies {
                self.busy.entry(copy.cluster).or_default();
            }
        }
        Ok(())
    }

    /// Whole clusters become zeros at once; what is left of others is written, or forgotten where it may be.
    pub(super) fn start_zero(&mut self, id: u64, offset: u64, length: u64) -> io::Result<()> {
        let cluster = self.top.qcow.cluster();
        let end = offset + length;
        let first = offset.div_ceil(cluster);
        let last = if end == self.size() { end.div_ceil(cluster) } else { end / cluster };
        if first < last {
            self.top.zero(first, last - first, self.next_job)?;
            self.top.settle(self.jobs.first_key_value().map_or(u64::MAX, |(oldest, _)| *oldest));
        }
        if self.requests[&id].op == Op::Discard {
            return Ok(());
        }
        let parts = if first < last {
            vec![(offset, first * cluster), (last * cluster, end)]
        } else if first * cluster < end && first > offset / cluster {
            vec![(offset, first * cluster), (first * cluster, end)]
        } else {
            vec![(offset, end)]
        };
        for (from, to) in parts.into_iter().filter(|(from, to)| from < to) {
            self.requests.get_mut(&id).expect("started").pending += 1;
            self.add(Request {
                tag: PARTS,
                op: Op::Write,
                offset: from,
                length: to - from,
                // A part is less than a cluster. Nothing is written to the buffer of a write.
                buffer: ZEROS.as_ptr().cast_mut(),
                pending: 0,
                error: None,
                copies: Vec::new(),
                marked: false,
                parent: Some(id),
            });
        }
        Ok(())
    }

    /// Write `data` at `offset` of the disk. Clusters of which it is a part only, and which are not in the top, are in
    /// `copies`, or what is below them reads as zeros.
    pub(super) fn finish_write(&mut self, offset: u64, data: &[u8], copies: &[Copied]) -> io::Result<()> {
        let cluster = self.top.qcow.cluster();
        let end = offset + data.len() as u64;
        let mut at = offset;
        while at < end {
            let first = at / cluster;
            let kind = self.kind(first, offset, data)?;
            let mut stop = first + 1;
            while stop * cluster < end && self.joins(first, stop, kind, offset, data)? {
                stop += 1;
            }
            let until = (stop * cluster).min(end);
            let part = &data[(at - offset) as usize..(until - offset) as usize];
            match kind {
                Kind::Zeros => self.top.zero(first, stop - first, self.next_job)?,
                Kind::There(host) => self.top.file().write_all_at(part, host + at % cluster)?,
                Kind::New => self.write_new(first, stop - first, at, part, copies)?,
            }
            at = until;
        }
        self.top.settle(self.jobs.first_key_value().map_or(u64::MAX, |(oldest, _)| *oldest));
        Ok(())
    }

    /// What is to be done for a cluster.
    fn kind(&self, cluster: u64, offset: u64, data: &[u8]) -> io::Result<Kind> {
        let size = self.top.qcow.cluster();
        let (from, to) = (cluster * size, ((cluster + 1) * size).min(self.size()));
        if offset <= from && to <= offset + data.len() as u64 {
            let part = &data[(from - offset) as usize..(to - offset) as usize];
            if part == &ZEROS[..part.len().min(ZEROS.len())] {
                return Ok(Kind::Zeros);
            }
        }
        Ok(match self.top.qcow.extent(from)?.0 {
            Extent::Data(host) => Kind::There(host),
            _ => Kind::New,
        })
    }

    /// Whether cluster `next` goes into the same write as `first`, of kind `kind`.
    fn joins(&self, first: u64, next: u64, kind: Kind, offset: u64, data: &[u8]) -> io::Result<bool> {
        Ok(match (kind, self.kind(next, offset, data)?) {
            (Kind::Zeros, Kind::Zeros) | (Kind::New, Kind::New) => true,
            (Kind::There(a), Kind::There(b)) => b == a + (next - first) * self.top.qcow.cluster(),
            _ => false,
        })
    }

    /// Write to clusters that the top does not have yet. `data` begins at `at` of the disk, within the first of them.
    fn write_new(
        &mut self,
        first: u64,
        count: u64,
        at: u64,
        data: &[u8],
        copies: &[Copied],
    ) -> io::Result<()> {
        let size = self.top.qcow.cluster();
        let mut done = 0;
        while done < count {
            let from = first + done;
            // One table at a time.
            let room = self.top.qcow.per_table() - from % self.top.qcow.per_table();
            let take = (count - done).min(room);
            let begin = (from * size).max(at);
            let written = self.put_some(from, take, begin, &data[(begin - at) as usize..], copies)?;
            done += written;
        }
        Ok(())
    }

    /// Allocate some of `count` clusters and write them; how many.
    fn put_some(
        &mut self,
        first: u64,
        count: u64,
        at: u64,
        data: &[u8],
        copies: &[Copied],
    ) -> io::Result<u64> {
        let size = self.top.qcow.cluster();
        // A copied cluster is written alone, as a whole.
        if let Some(copy) = copies.iter().find(|copy| copy.cluster == first) {
            let mut whole = copy.data.clone();
            let inside = (at % size) as usize;
            let length = data.len().min(size as usize - inside);
            whole[inside..inside + length].copy_from_slice(&data[..length]);
            match trimmed(&whole) {
                // A cluster of the file of which nothing was ever written can be behind the file's end.
                [] => self.top.zero(first, 1, self.next_job)?,
                some => self.put(first, 1, &[(0, some)])?,
            }
            return Ok(1);
        }
        let next =
            copies.iter().map(|copy| copy.cluster).find(|cluster| (first..first + count).contains(cluster));
        let count = next.map_or(count, |cluster| cluster - first);
        let limit = ((first + count) * size - at).min(data.len() as u64) as usize;
        self.put(first, count, &[(at % size, &data[..limit])])?;
        Ok(count)
    }

    /// Give `count` clusters from `first` on, none of which has any, clusters of the file with these contents.
    pub(super) fn put(&mut self, first: u64, count: u64, parts: &[(u64, &[u8])]) -> io::Result<()> {
        let size = self.top.qcow.cluster();
        self.top.make_table(first)?;
        let mut done = 0;
        while done < count {
            let (host, got) = self.top.allocate(count - done)?;
            if let Err(error) = self.write_window(host, got, done * size, parts) {
                self.top.abandon(host, got);
                return Err(error);
            }
            // If this fails they may be named already: they stay counted.
            self.name(first + done, host, got)?;
            done += got;
        }
        Ok(())
    }

    /// Write the window of `parts` that begins at `skip` to `count` clusters of the file.
    fn write_window(&self, host: u64, count: u64, skip: u64, parts: &[(u64, &[u8])]) -> io::Result<()> {
        let size = self.top.qcow.cluster();
        for (at, data) in parts {
            let (from, to) = ((*at).max(skip), (at + data.len() as u64).min(skip + count * size));
            if from < to {
                let part = &data[(from - at) as usize..(to - at) as usize];
                self.top.file().write_all_at(part, host * size + from - skip)?;
            }
        }
        Ok(())
    }

    /// Let clusters of the disk be those of the file.
    fn name(&mut self, cluster: u64, host: u64, count: u64) -> io::Result<()> {
        let size = self.top.qcow.cluster();
        let old =
            (cluster..cluster + count).map(|at| self.top.qcow.entry(at)).collect::<io::Result<Vec<_>>>()?;
        let entries: Vec<u64> = (0..count).map(|n| ((host + n) * size) | COPIED).collect();
        self.top.qcow.set_entries(cluster, &entries)?;
        for entry in old.into_iter().filter(|entry| entry & ZERO != 0) {
            // Zeros may have clusters of the file in reserve; ours have not.
            if let Some(reserve) = self.top.host_cluster(entry) {
                self.top.release(reserve, 1, self.next_job)?;
            }
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Zeros,
    /// In the top already, at this position of its file.
    There(u64),
    New,
}

/// Without the zeros at the end, which a new cluster reads as anyway.
fn trimmed(data: &[u8]) -> &[u8] {
    let mut end = data.len();
    while end >= 4096 && data[end - 4096..end] == ZEROS[..4096] {
        end -= 4096;
    }
    &data[..end]
}
