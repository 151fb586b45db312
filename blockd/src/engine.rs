//! Requests of a disk, carried out on a chain of files. Knows nothing of ublk.
//!
//! One thread, no waiting: what may have to wait for a disk or a network (reading) is handed to `Reads` and continued
//! when that is done; writes go to the page cache at once. The only thing that takes more than one step is a write to
//! a part of a cluster that must first be copied from below; such clusters are `busy`, and whoever would write to them
//! waits. So a rebase has to wait for them only: nothing else is ever half done.

mod writing;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::mem;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::active::Active;
use crate::header::{self, invalid};
use crate::layer::{self, open_chain, push, resolve, Extent, Handle, Layer, Segment};
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

/// Told of the file that becomes the top, before it does.
pub type Note = Box<dyn FnMut(&Path) -> io::Result<()>>;

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
    note: Note,
    completed: Vec<(u64, i32)>,
}

const PARTS: u64 = u64::MAX; // the tag of requests that are parts of others
static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

impl Engine {
    pub fn open(path: &Path, note: Note) -> io::Result<Engine> {
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
}

fn number(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}
