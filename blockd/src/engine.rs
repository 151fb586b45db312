//! Requests of a disk, carried out on a chain of files. Knows nothing of ublk.
//!
//! One thread, no waiting: what may have to wait for a disk or a network (reading) is handed to `Reads` and continued
//! when that is done; writes go to the page cache at once. The only thing that takes more than one step is a write to
//! a part of a cluster that must first be copied from below; such clusters are `busy`, and whoever would write to them
//! waits. So a rebase has to wait for them only: nothing else is ever half done.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::mem;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::active::Active;
use crate::header::{self, invalid};
use crate::layer::{self, open_chain, push, resolve, Extent, Handle, Layer, Segment, COPIED, ZERO};
use crate::system;

/// What reads a file without stopping the thread.
pub trait Reads {
    /// Read now if the page cache has it. None: it would have to wait.
    fn now(&mut self, file: &Handle, buffer: &mut [u8], at: u64) -> Option<io::Result<usize>>;
    /// Read, and tell `Engine::read_done` of it. `to` is valid until then, and `file` open.
    fn later(&mut self, token: u64, file: &Handle, to: *mut u8, length: usize, at: u64);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Read,
    Write,
    /// Must read as zeros afterwards.
    Zero,
    /// May read as anything afterwards; whole clusters read as zeros.
    Discard,
}

/// A request under way. `buffer` has `length` bytes for reads and writes and is the caller's until it is completed.
struct Request {
    tag: u64,
    op: Op,
    offset: u64,
    length: u64,
    buffer: *mut u8,
    /// Reads, or requests made of this one, that are not done.
    pending: usize,
    error: Option<i32>,
    copies: Vec<Copied>,
    /// Whether the clusters of `copies` are busy because of it.
    marked: bool,
    /// The request that this is a part of.
    parent: Option<u64>,
}

/// A cluster that is made of what was below it, and of a part of a write.
struct Copied {
    cluster: u64,
    data: Vec<u8>,
}

struct Job {
    request: u64,
    file: Rc<Handle>,
    to: *mut u8,
    length: usize,
    at: u64,
}

/// A rebase that waits for copies to end.
struct Rebase {
    overlay: PathBuf,
    done: Box<dyn FnOnce(io::Result<()>)>,
}

pub struct Engine {
    top: Active,
    below: Vec<Rc<Layer>>,
    requests: HashMap<u64, Request>,
    next_request: u64,
    jobs: BTreeMap<u64, Job>,
    next_job: u64,
    /// Clusters that are being copied, and the requests that wait for that.
    busy: HashMap<u64, Vec<u64>>,
    /// Requests to start, or to start again.
    ready: VecDeque<u64>,
    /// Writes that came while a rebase waits.
    held: Vec<u64>,
    /// Writes that found no room on the host's disk.
    parked: Vec<u64>,
    rebase: Option<Rebase>,
    /// Told of the file that becomes the top, before it does.
    note: Box<dyn FnMut(&Path) -> io::Result<()>>,
    completed: Vec<(u64, i32)>,
}

const PARTS: u64 = u64::MAX; // the tag of requests that are parts of others
static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

impl Engine {
    pub fn open(path: &Path, note: Box<dyn FnMut(&Path) -> io::Result<()>>) -> io::Result<Engine> {
        let top = Active::open(path)?;
        let below = match layer::below(&top.qcow.header, path)? {
            Some((path, format)) => open_chain(&path, &format)?,
            None => Vec::new(),
        };
        Ok(Engine {
            top,
            below,
            requests: HashMap::new(),
            next_request: 0,
            jobs: BTreeMap::new(),
            next_job: 0,
            busy: HashMap::new(),
            ready: VecDeque::new(),
            held: Vec::new(),
            parked: Vec::new(),
            rebase: None,
            note,
            completed: Vec::new(),
        })
    }

    pub fn size(&self) -> u64 {
        self.top.qcow.header.size
    }

    pub fn disk(&self) -> &Path {
        &self.top.qcow.handle.path
    }

    pub fn chain(&self) -> Vec<PathBuf> {
        let below = self.below.iter().map(|layer| layer.handle().path.clone());
        std::iter::once(self.disk().to_path_buf()).chain(below).collect()
    }

    /// Requests that are done since the last call: tag and result, bytes or a negative error number.
    pub fn completed(&mut self) -> Vec<(u64, i32)> {
        mem::take(&mut self.completed)
    }

    /// Whether requests wait for room on the host's disk: call `retry` from time to time.
    pub fn full(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Start a request. It is in `completed` when it is done, which may be at once.
    pub fn submit(
        &mut self,
        io: &mut dyn Reads,
        tag: u64,
        op: Op,
        offset: u64,
        length: u64,
        buffer: *mut u8,
    ) {
        if offset.checked_add(length).map_or(true, |end| end > self.size()) {
            self.completed.push((tag, -libc::EIO));
            return;
        }
        self.add(Request {
            tag,
            op,
            offset,
            length,
            buffer,
            pending: 0,
            error: None,
            copies: Vec::new(),
            marked: false,
            parent: None,
        });
        self.run(io);
    }

    pub fn retry(&mut self, io: &mut dyn Reads) {
        self.ready.extend(mem::take(&mut self.parked));
        self.run(io);
    }

    /// Continue on `overlay`, an empty file over the present one, once no copy is under way.
    pub fn rebase(&mut self, io: &mut dyn Reads, overlay: PathBuf, done: Box<dyn FnOnce(io::Result<()>)>) {
        if self.rebase.is_some() {
            return done(Err(invalid("a rebase is under way already".into())));
        }
        self.rebase = Some(Rebase { overlay, done });
        self.run(io);
    }

    /// Read what the top does not hold from `backing` and name it in the header of the top.
    pub fn replace_backing(&mut self, backing: &Path) -> io::Result<()> {
        let below = open_chain(backing, "qcow2")?;
        let size = below.first().map_or(0, |layer| layer.size());
        if size < self.below.first().map_or(0, |layer| layer.size()).min(self.size()) {
            return Err(invalid(format!("{} is smaller than what is to be replaced", backing.display())));
        }
        header::write_backing(self.top.file(), self.disk(), backing, "qcow2")?;
        self.below = below;
        self.top.qcow.header.backing = Some(backing.to_path_buf());
        Ok(())
    }

    pub fn grow(&mut self, size: u64) -> io::Result<()> {
        let present = self.size();
        if size < present || size % 512 != 0 {
            return Err(invalid(format!("the disk has {present} bytes and cannot have {size}")));
        }
        self.top.cover(size)?;
        // A longer file below must not show through.
        let hidden = self.below.first().map_or(0, |layer| layer.size()).min(size);
        if hidden > present {
            let cluster = self.top.qcow.cluster();
            if present % cluster != 0 {
                self.keep_tail_zero(present)?;
            }
            let first = present.div_ceil(cluster);
            self.top.zero(first, hidden.div_ceil(cluster).saturating_sub(first), self.next_job)?;
        }
        self.top.set_size(size)
    }

    /// The cluster in which the disk ends, so that what is behind the end reads as zeros.
    fn keep_tail_zero(&mut self, end: u64) -> io::Result<()> {
        let cluster = self.top.qcow.cluster();
        let start = end - end % cluster;
        let mut data = vec![0; cluster as usize];
        let mut segments = Vec::new();
        match self.top.qcow.extent(start)?.0 {
            Extent::Nothing => resolve(&self.below, start, end - start, 0, &mut segments)?,
            Extent::Zero => {}
            Extent::Data(_) => {
                return self.top.file().write_all_at(&data[(end - start) as usize..], self.host(end)?)
            }
        }
        for segment in segments {
            if let Some((handle, at)) = segment.source {
                let range = segment.at as usize..(segment.at + segment.length) as usize;
                header::read_up_to(&handle.file, &mut data[range], at)?;
            }
        }
        self.put(start / cluster, 1, &[(0, &data)])
    }

    fn host(&self, offset: u64) -> io::Result<u64> {
        match self.top.qcow.extent(offset)?.0 {
            Extent::Data(at) => Ok(at),
            _ => Err(invalid("a cluster is not allocated".into())),
        }
    }

    fn add(&mut self, request: Request) {
        let id = self.next_request;
        self.next_request += 1;
        self.requests.insert(id, request);
        self.ready.push_back(id);
    }

    /// Do all that can be done now.
    fn run(&mut self, io: &mut dyn Reads) {
        loop {
            while let Some(id) = self.ready.pop_front() {
                self.start(io, id);
            }
            self.try_rebase();
            if self.ready.is_empty() {
                return;
            }
        }
    }

    fn try_rebase(&mut self) {
        if !self.busy.is_empty() {
            return;
        }
        if let Some(Rebase { overlay, done }) = self.rebase.take() {
            done(self.switch(&overlay));
            self.ready.extend(mem::take(&mut self.held));
        }
    }

    fn switch(&mut self, overlay: &Path) -> io::Result<()> {
        let fresh = Active::open(overlay)?;
        let over = fresh.qcow.header.backing.as_deref().unwrap_or(Path::new(""));
        if !system::same_file(over, self.top.file())?
            || fresh.qcow.header.backing_format.as_deref() != Some("qcow2")
        {
            return Err(invalid(format!("{} is not over {}", overlay.display(), self.disk().display())));
        }
        if fresh.qcow.header.size != self.size() || fresh.qcow.l1.iter().any(|entry| *entry != 0) {
            return Err(invalid(format!("{} is not an empty overlay of the same size", overlay.display())));
        }
        (self.note)(overlay)?;
        let frozen = mem::replace(&mut self.top, fresh).freeze();
        self.below.insert(0, Rc::new(Layer::Qcow(frozen)));
        Ok(())
    }

    fn start(&mut self, io: &mut dyn Reads, id: u64) {
        let Some(request) = self.requests.get(&id) else { return };
        let (op, offset, length) = (request.op, request.offset, request.length);
        if op == Op::Read {
            let result = self.start_read(io, id, offset, length);
            return self.advance(id, result);
        }
        if self.rebase.is_some() {
            self.held.push(id);
            return;
        }
        let cluster = self.top.qcow.cluster();
        if length > 0 && !self.busy.is_empty() {
            for at in offset / cluster..=(offset + length - 1) / cluster {
                if let Some(waiting) = self.busy.get_mut(&at) {
                    waiting.push(id);
                    return;
                }
            }
        }
        let result = match op {
            Op::Write => self.start_write(io, id, offset, length),
            _ => self.start_zero(id, offset, length),
        };
        self.advance(id, result);
    }

    fn start_read(&mut self, io: &mut dyn Reads, id: u64, offset: u64, length: u64) -> io::Result<()> {
        let mut segments = Vec::new();
        let mut done = 0;
        while done < length {
            let (extent, same) = self.top.qcow.extent(offset + done)?;
            let count = same.min(length - done);
            match extent {
                Extent::Nothing => resolve(&self.below, offset + done, count, done, &mut segments)?,
                Extent::Zero => push(&mut segments, Segment { at: done, length: count, source: None }),
                Extent::Data(at) => {
                    let source = Some((self.top.qcow.handle.clone(), at));
                    push(&mut segments, Segment { at: done, length: count, source });
                }
            }
            done += count;
        }
        let buffer = self.requests[&id].buffer;
        self.fetch(io, id, segments, buffer)
    }

    /// Read segments to `to`, which stays where it is until request `id` is done.
    fn fetch(&mut self, io: &mut dyn Reads, id: u64, segments: Vec<Segment>, to: *mut u8) -> io::Result<()> {
        for segment in segments {
            // SAFETY: segments are within the request, whose buffer or copy `to` is.
            let part = unsafe {
                std::slice::from_raw_parts_mut(to.add(segment.at as usize), segment.length as usize)
            };
            let Some((file, at)) = segment.source else {
                part.fill(0);
                continue;
            };
            let mut done = 0;
            while done < part.len() {
                match io.now(&file, &mut part[done..], at + done as u64) {
                    None => break,
                    Some(Ok(0)) => {
                        part[done..].fill(0); // behind the end of the file
                        done = part.len();
                    }
                    Some(Ok(count)) => done += count,
                    Some(Err(error)) => return Err(error),
                }
            }
            if done < part.len() {
                let rest = &mut part[done..];
                let job = Job {
                    request: id,
                    to: rest.as_mut_ptr(),
                    length: rest.len(),
                    at: at + done as u64,
                    file,
                };
                self.later(io, job);
            }
        }
        Ok(())
    }

    fn later(&mut self, io: &mut dyn Reads, job: Job) {
        let token = self.next_job;
        self.next_job += 1;
        if let Some(request) = self.requests.get_mut(&job.request) {
            request.pending += 1;
        }
        io.later(token, &job.file, job.to, job.length, job.at);
        self.jobs.insert(token, job);
    }

    /// A read is done: bytes, or a negative error number.
    pub fn read_done(&mut self, io: &mut dyn Reads, token: u64, result: i32) {
        let Some(mut job) = self.jobs.remove(&token) else { return };
        let id = job.request;
        if let Some(request) = self.requests.get_mut(&id) {
            request.pending -= 1;
        }
        let again = result == -libc::EINTR || result == -libc::EAGAIN;
        let mut outcome = Ok(());
        if result < 0 && !again {
            outcome = Err(io::Error::from_raw_os_error(-result));
        } else if result == 0 {
            // SAFETY: the job's buffer is the request's, which is not done.
            unsafe { std::ptr::write_bytes(job.to, 0, job.length) };
        } else if again || (result as usize) < job.length {
            let count = if again { 0 } else { result as usize };
            // SAFETY: as above; `count` is less than its length.
            job.to = unsafe { job.to.add(count) };
            job.length -= count;
            job.at += count as u64;
            self.later(io, job);
        }
        self.top.settle(self.jobs.first_key_value().map_or(u64::MAX, |(oldest, _)| *oldest));
        self.advance(id, outcome);
        self.run(io);
    }

    fn start_write(&mut self, io: &mut dyn Reads, id: u64, offset: u64, length: u64) -> io::Result<()> {
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
    fn start_zero(&mut self, id: u64, offset: u64, length: u64) -> io::Result<()> {
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

    /// Something of a request is done, or failed: go on with it if nothing else is pending.
    fn advance(&mut self, id: u64, outcome: io::Result<()>) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if let Err(error) = outcome {
            request.error.get_or_insert(number(&error));
        }
        if request.pending > 0 {
            return;
        }
        if request.op == Op::Write && request.error.is_none() {
            let (offset, length, buffer) = (request.offset, request.length, request.buffer);
            let (copies, marked) = (mem::take(&mut request.copies), mem::take(&mut request.marked));
            // SAFETY: the buffer of a write is readable until it is completed.
            let data = unsafe { std::slice::from_raw_parts(buffer, length as usize) };
            let written = self.finish_write(offset, data, &copies);
            self.free_copies(&copies, marked);
            if let Err(error) = written {
                self.requests.get_mut(&id).expect("not done").error = Some(number(&error));
            }
        }
        let request = self.requests.get_mut(&id).expect("not done");
        if matches!(request.error, Some(libc::ENOSPC | libc::EDQUOT)) {
            // It waits for room, as a virtual machine of QEMU with werror=enospc does.
            request.error = None;
            let (copies, marked) = (mem::take(&mut request.copies), mem::take(&mut request.marked));
            self.free_copies(&copies, marked);
            self.parked.push(id);
            return;
        }
        let request = self.requests.remove(&id).expect("not done");
        self.free_copies(&request.copies, request.marked);
        if let Some(parent) = request.parent {
            if let Some(whole) = self.requests.get_mut(&parent) {
                whole.pending -= 1;
            }
            let outcome = request.error.map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code)));
            return self.advance(parent, outcome);
        }
        let done = match (request.error, request.op) {
            (Some(code), _) => -code,
            (None, Op::Read | Op::Write) => request.length as i32,
            (None, _) => 0,
        };
        self.completed.push((request.tag, done));
    }

    fn free_copies(&mut self, copies: &[Copied], marked: bool) {
        for copy in copies.iter().filter(|_| marked) {
            if let Some(waiting) = self.busy.remove(&copy.cluster) {
                self.ready.extend(waiting);
            }
        }
    }

    /// Write `data` at `offset` of the disk. Clusters of which it is a part only, and which are not in the top, are in
    /// `copies`, or what is below them reads as zeros.
    fn finish_write(&mut self, offset: u64, data: &[u8], copies: &[Copied]) -> io::Result<()> {
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
    fn put(&mut self, first: u64, count: u64, parts: &[(u64, &[u8])]) -> io::Result<()> {
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
        let entries: Vec<u64> = (0..count).map(|n| (host + n) * size | COPIED).collect();
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

fn number(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}
