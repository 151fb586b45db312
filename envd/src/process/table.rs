//! Running processes, their subscribers, and their input.

use crate::codec::Codec;
use crate::connect::{err, Code, RpcError, StreamEvent};
use crate::proto::{Empty, Event, EventResponse, ProcessEvent, ProcessInfo, StartEvent};
use crate::proto::{Selector, SelectorKind};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

/// Events a subscriber may lag behind before the process is made to wait for it.
const BACKLOG: usize = 16;

pub type Fd = Arc<AsyncFd<OwnedFd>>;

impl StreamEvent for Event {
    fn encode(&self, codec: Codec) -> Vec<u8> {
        let event = ProcessEvent { event: Some(self.clone()) };
        codec.encode(&EventResponse { event: Some(event) })
    }

    fn keepalive() -> Self {
        Event::Keepalive(Empty {})
    }
}

/// Where input goes.
pub enum Input {
    Pty(Fd),
    Pipe(Fd),
    /// Never opened, or closed by `CloseStdin`.
    Closed,
}

pub struct Process {
    pub info: ProcessInfo,
    /// The terminal, for resizing.
    pub pty: Option<Fd>,
    /// Held while writing, so that concurrent inputs are not interleaved.
    pub input: tokio::sync::Mutex<Input>,
    /// `None` once the end event is being sent.
    subscribers: Mutex<Option<Vec<mpsc::Sender<Event>>>>,
}

impl Process {
    pub fn new(info: ProcessInfo, pty: Option<Fd>, input: Input) -> Process {
        let input = tokio::sync::Mutex::new(input);
        let subscribers = Mutex::new(Some(Vec::new()));
        Process { info, pty, input, subscribers }
    }

    pub fn pid(&self) -> i32 {
        self.info.pid as i32
    }

    /// Gives a receiver that starts with the start event and sees everything from now on.
    pub fn subscribe(&self) -> Option<mpsc::Receiver<Event>> {
        let (tx, rx) = mpsc::channel(BACKLOG);
        // The new channel has room.
        let _ = tx.try_send(Event::Start(StartEvent { pid: self.info.pid }));
        let mut guard = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        guard.as_mut()?.push(tx);
        Some(rx)
    }

    /// Sends to every subscriber, waiting for slow ones and forgetting those that went away.
    pub async fn emit(&self, event: Event) {
        let targets = {
            let mut guard = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(subscribers) = guard.as_mut() else { return };
            subscribers.retain(|s| !s.is_closed());
            subscribers.clone()
        };
        send_all(&targets, event).await;
    }

    /// Sends the last event and lets the subscribers' streams end.
    pub async fn finish(&self, event: Event) {
        let targets = {
            let mut guard = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
            guard.take().unwrap_or_default()
        };
        send_all(&targets, event).await;
    }
}

async fn send_all(targets: &[mpsc::Sender<Event>], event: Event) {
    for target in targets {
        // An error means that the subscriber went away while we waited.
        let _ = target.send(event.clone()).await;
    }
}

/// Writes everything, waiting for the process to read.
pub async fn write_all(fd: &Fd, mut data: &[u8]) -> io::Result<()> {
    while !data.is_empty() {
        let mut guard = fd.writable().await?;
        let written = guard.try_io(|inner| {
            // SAFETY: `data` is valid for its length.
            let n = unsafe { libc::write(inner.as_raw_fd(), data.as_ptr().cast(), data.len()) };
            usize::try_from(n).map_err(|_| io::Error::last_os_error())
        });
        match written {
            Ok(Ok(n)) => data = &data[n..],
            Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(e)) => return Err(e),
            Err(_would_block) => {}
        }
    }
    Ok(())
}

#[derive(Default)]
pub struct Table(Mutex<BTreeMap<u32, Arc<Process>>>);

impl Table {
    fn map<T>(&self, f: impl FnOnce(&mut BTreeMap<u32, Arc<Process>>) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn insert(&self, process: &Arc<Process>) {
        self.map(|m| m.insert(process.info.pid, process.clone()));
    }

    /// Removes this very process: its pid may have been reused while subscribers were slow.
    pub fn remove(&self, process: &Arc<Process>) {
        self.map(|m| {
            let pid = process.info.pid;
            if m.get(&pid).is_some_and(|p| Arc::ptr_eq(p, process)) {
                m.remove(&pid);
            }
        });
    }

    pub fn all(&self) -> Vec<Arc<Process>> {
        self.map(|m| m.values().cloned().collect())
    }

    pub fn find(&self, selector: Option<Selector>) -> Result<Arc<Process>, RpcError> {
        match selector.and_then(|s| s.selector) {
            None => err(Code::InvalidArgument, "a process selector (pid or tag) is required"),
            Some(SelectorKind::Pid(pid)) => self
                .map(|m| m.get(&pid).cloned())
                .ok_or_else(|| RpcError::new(Code::NotFound, format!("process with pid {pid} not found"))),
            Some(SelectorKind::Tag(tag)) => {
                let found = self.map(|m| {
                    let mut all = m.values();
                    all.find(|p| p.info.tag.as_deref() == Some(&tag)).cloned()
                });
                found
                    .ok_or_else(|| RpcError::new(Code::NotFound, format!("process with tag {tag} not found")))
            }
        }
    }
}
