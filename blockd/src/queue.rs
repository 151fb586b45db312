//! The thread that serves the devices of one disk: an io_uring carries requests of the kernel, reads of files, and a
//! bell for messages from the control socket's threads.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::PathBuf;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;

use io_uring::{opcode, squeue, types, IoUring};
use serde_json::{json, Value};

use crate::engine::{Engine, Op, Reads};
use crate::layer::Handle;
use crate::system;
use crate::uapi::{self, Descriptor, IoCommand};

const ENTRIES: u32 = 256;
const SECTOR: u64 = 512;
const PAGE: usize = 4096;
/// How long a write that found the host's disk full waits until it is tried again.
const RETRY: types::Timespec = types::Timespec::new().sec(1);

// What an entry of the ring was, in the upper bits of its number.
const KIND_SHIFT: u32 = 56;
const REQUEST: u64 = 0;
const READ: u64 = 1;
const BELL: u64 = 2;
const TIMER: u64 = 3;

pub type Answer<T> = Sender<Result<T, String>>;

pub enum Message {
    /// Serve another device, whose character device this is. Answered when requests can come.
    Attach {
        device: u32,
        file: File,
        depth: u16,
        max_io: u32,
        answer: Answer<()>,
    },
    Rebase {
        overlay: PathBuf,
        answer: Answer<()>,
    },
    ReplaceBacking {
        backing: PathBuf,
        answer: Answer<()>,
    },
    Grow {
        size: u64,
        answer: Answer<()>,
    },
    Status {
        answer: Answer<Value>,
    },
}

/// Sends messages to the thread and waits for answers.
#[derive(Clone)]
pub struct Queue {
    inbox: Sender<Message>,
    bell: Arc<File>,
}

impl Queue {
    pub fn ask<T>(&self, message: impl FnOnce(Answer<T>) -> Message) -> Result<T, String> {
        let (sender, receiver) = channel();
        self.inbox.send(message(sender)).map_err(|_| "the queue has ended")?;
        io::Write::write_all(&mut &*self.bell, &1u64.to_ne_bytes()).map_err(|error| error.to_string())?;
        receiver.recv().map_err(|_| "the queue has ended".to_string())?
    }
}

/// Start the thread with the disk that `open` opens on it. Ends when the last device was stopped.
pub fn start(
    open: impl FnOnce() -> io::Result<Engine> + Send + 'static,
) -> io::Result<(Queue, u64, std::thread::JoinHandle<()>)> {
    // SAFETY: a new file descriptor, owned from here on.
    let bell = unsafe {
        match libc::eventfd(0, libc::EFD_CLOEXEC) {
            -1 => return Err(io::Error::last_os_error()),
            fd => Arc::new(File::from_raw_fd(fd)),
        }
    };
    let (inbox, messages) = channel();
    let (opened, outcome) = channel();
    let ring_bell = bell.clone();
    let thread = std::thread::Builder::new().name("queue".into()).spawn(move || {
        let made = open().and_then(|engine| Ok((engine.size(), Worker::new(engine, messages, ring_bell)?)));
        match made {
            Ok((size, mut worker)) => {
                let _ = opened.send(Ok(size));
                if let Err(error) = worker.run() {
                    eprintln!("aenv-blockd: the queue ends: {error}");
                    std::process::exit(1);
                }
            }
            Err(error) => drop(opened.send(Err(error))),
        }
    })?;
    let size = outcome.recv().map_err(|_| io::Error::other("the queue did not start"))??;
    Ok((Queue { inbox, bell }, size, thread))
}

/// A device that is served: its descriptors are mapped, and each tag has a buffer.
struct Attached {
    file: File,
    depth: u16,
    max_io: u32,
    descriptors: Mapping,
    buffers: Mapping,
    /// Tags that the driver has not taken back.
    live: u16,
}

struct Mapping {
    at: *mut u8,
    length: usize,
}

impl Mapping {
    fn new(length: usize, file: Option<&File>) -> io::Result<Mapping> {
        let length = length.div_ceil(PAGE) * PAGE;
        let (protection, flags, fd) = match file {
            Some(file) => (libc::PROT_READ, libc::MAP_SHARED | libc::MAP_POPULATE, file.as_raw_fd()),
            None => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        match unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, fd, 0) } {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            at => {
                // A huge page for the buffer of one small request would be most of this process.
                // SAFETY: the mapping that was just made; advice changes no contents.
                unsafe { libc::madvise(at, length, libc::MADV_NOHUGEPAGE) };
                Ok(Mapping { at: at.cast(), length })
            }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it is ours, and the device that used it is stopped.
        unsafe { libc::munmap(self.at.cast(), self.length) };
    }
}

/// The ring, as the engine sees it.
struct Ring(IoUring);

impl Ring {
    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: buffers that entries name live until they are completed.
        while unsafe { self.0.submission().push(&entry) }.is_err() {
            let _ = self.0.submit();
        }
    }
}

impl Reads for Ring {
    fn now(&mut self, file: &Handle, buffer: &mut [u8], at: u64) -> Option<io::Result<usize>> {
        if file.waits.get() {
            return None;
        }
        match system::read_cached(&file.file, buffer, at) {
            Ok(count) => Some(Ok(count)),
            Err(error) => {
                // Files of a FUSE server cannot be asked that.
                file.waits.set(error.raw_os_error() == Some(libc::EOPNOTSUPP));
                None // not cached, or an error that the read will meet again
            }
        }
    }

    fn later(&mut self, token: u64, file: &Handle, to: *mut u8, length: usize, at: u64) {
        let read = opcode::Read::new(types::Fd(file.fd()), to, length as u32).offset(at);
        self.push(read.build().user_data(READ << KIND_SHIFT | token));
    }
}

struct Worker {
    ring: Ring,
    engine: Engine,
    messages: Receiver<Message>,
    bell: Arc<File>,
    rung: Box<u64>,
    timer: bool,
    said_full: bool,
    devices: HashMap<u32, Attached>,
    requests: u64,
}

impl Worker {
    fn new(engine: Engine, messages: Receiver<Message>, bell: Arc<File>) -> io::Result<Worker> {
        let ring = IoUring::builder().setup_coop_taskrun().setup_single_issuer().build(ENTRIES)?;
        Ok(Worker {
            ring: Ring(ring),
            engine,
            messages,
            bell,
            rung: Box::new(0),
            timer: false,
            said_full: false,
            devices: HashMap::new(),
            requests: 0,
        })
    }

    fn run(&mut self) -> io::Result<()> {
        self.listen();
        let mut served = false;
        while !(served && self.devices.is_empty()) {
            match self.ring.0.submit_and_wait(1) {
                Err(error)
                    if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {}
                Err(error) => return Err(error),
                Ok(_) => {}
            }
            let done: Vec<(u64, i32)> =
                self.ring.0.completion().map(|e| (e.user_data(), e.result())).collect();
            for (number, result) in done {
                let low = number & ((1 << KIND_SHIFT) - 1);
                match number >> KIND_SHIFT {
                    REQUEST => self.on_request(low, result),
                    READ => self.engine.read_done(&mut self.ring, low, result),
                    BELL => {
                        while let Ok(message) = self.messages.try_recv() {
                            self.on_message(message);
                        }
                        self.listen();
                    }
                    _ => {
                        self.timer = false;
                        self.engine.retry(&mut self.ring);
                    }
                }
            }
            self.answer();
            served |= !self.devices.is_empty();
        }
        Ok(())
    }

    fn listen(&mut self) {
        let bell = types::Fd(self.bell.as_raw_fd());
        let read = opcode::Read::new(bell, std::ptr::addr_of_mut!(*self.rung).cast(), 8);
        self.ring.push(read.build().user_data(BELL << KIND_SHIFT));
    }

    /// Tell the driver what is done, and ask for the next request with each.
    fn answer(&mut self) {
        for (number, result) in self.engine.completed() {
            self.ask(number, uapi::COMMIT_AND_FETCH, result);
        }
        if self.engine.full() && !self.timer {
            self.timer = true;
            self.ring.push(opcode::Timeout::new(&RETRY).build().user_data(TIMER << KIND_SHIFT));
        }
        if self.engine.full() != self.said_full {
            self.said_full = self.engine.full();
            eprintln!(
                "aenv-blockd: {}",
                if self.said_full { "no room left: writes wait" } else { "there is room again" }
            );
        }
    }

    fn ask(&mut self, number: u64, operation: u32, result: i32) {
        let (device, tag) = ((number >> 16) as u32, number as u16);
        let Some(attached) = self.devices.get(&device) else { return };
        let address = attached.buffers.at as u64 + u64::from(tag) * u64::from(attached.max_io);
        let command = IoCommand { queue: 0, tag, result, address };
        let entry =
            opcode::UringCmd16::new(types::Fd(attached.file.as_raw_fd()), operation).cmd(command.bytes());
        self.ring.push(entry.build().user_data(REQUEST << KIND_SHIFT | number));
    }

    fn on_request(&mut self, number: u64, result: i32) {
        let (device, tag) = ((number >> 16) as u32, number as u16);
        let Some(attached) = self.devices.get_mut(&device) else { return };
        if result != 0 {
            // The driver takes the tag back: the device is stopped.
            attached.live -= 1;
            if attached.live == 0 {
                self.devices.remove(&device);
            }
            return;
        }
        self.requests += 1;
        // SAFETY: the mapping has `depth` descriptors, and the driver wrote this one before it completed the command.
        let described = unsafe {
            std::ptr::read_volatile(attached.descriptors.at.cast::<Descriptor>().add(usize::from(tag)))
        };
        // SAFETY: each tag has `max_io` bytes.
        let buffer = unsafe { attached.buffers.at.add(usize::from(tag) * attached.max_io as usize) };
        let (offset, length) = (described.start * SECTOR, u64::from(described.sectors) * SECTOR);
        let op = match described.operation & 0xff {
            uapi::OP_READ => Op::Read,
            uapi::OP_WRITE => Op::Write,
            uapi::OP_DISCARD => Op::Discard,
            uapi::OP_WRITE_ZEROES => Op::Zero,
            uapi::OP_FLUSH => return self.ask(number, uapi::COMMIT_AND_FETCH, 0),
            _ => return self.ask(number, uapi::COMMIT_AND_FETCH, -libc::EOPNOTSUPP),
        };
        if matches!(op, Op::Read | Op::Write) && length > u64::from(attached.max_io) {
            return self.ask(number, uapi::COMMIT_AND_FETCH, -libc::EIO);
        }
        self.engine.submit(&mut self.ring, number, op, offset, length, buffer);
    }

    fn on_message(&mut self, message: Message) {
        let text = |result: io::Result<()>| result.map_err(|error| error.to_string());
        match message {
            Message::Attach { device, file, depth, max_io, answer } => {
                let outcome = text(self.attach(device, file, depth, max_io));
                let _ = answer.send(outcome);
            }
            Message::Rebase { overlay, answer } => {
                let report = Box::new(move |result| drop(answer.send(text(result))));
                self.engine.rebase(&mut self.ring, overlay, report);
            }
            Message::ReplaceBacking { backing, answer } => {
                let _ = answer.send(text(self.engine.replace_backing(&backing)));
            }
            Message::Grow { size, answer } => {
                let _ = answer.send(text(self.engine.grow(size)));
            }
            Message::Status { answer } => {
                let _ = answer.send(Ok(json!({
                    "disk": self.engine.disk(),
                    "chain": self.engine.chain(),
                    "size": self.engine.size(),
                    "full": self.engine.full(),
                    "requests": self.requests,
                })));
            }
        }
    }

    fn attach(&mut self, device: u32, file: File, depth: u16, max_io: u32) -> io::Result<()> {
        let descriptors = Mapping::new(usize::from(depth) * std::mem::size_of::<Descriptor>(), Some(&file))?;
        let buffers = Mapping::new(usize::from(depth) * max_io as usize, None)?;
        self.devices.insert(device, Attached { file, depth, max_io, descriptors, buffers, live: depth });
        for tag in 0..self.devices[&device].depth {
            self.ask(u64::from(device) << 16 | u64::from(tag), uapi::FETCH, 0);
        }
        self.ring.0.submit()?;
        Ok(())
    }
}
