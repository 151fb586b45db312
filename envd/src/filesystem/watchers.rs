//! Watching: as a stream (`WatchDir`), and by polling (`CreateWatcher`, `GetWatcherEvents`, `RemoveWatcher`).

use super::inotify::Watch;
use super::messages::*;
use super::{resolve, with_user};
use crate::app::App;
use crate::codec::Codec;
use crate::connect::{err, Code, RpcError, StreamEvent};
use crate::proto::Empty;
use hyper::header::HeaderMap;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

/// Events a polled watcher keeps for its client; older ones are dropped first.
const KEEP: usize = 10_000;
/// Network and user-space file systems, where inotify misses what others change.
const NETWORK: [i64; 6] = [0x6969, 0xff53_4d42, 0xfe53_4d42, 0x517b, 0x6573_5546, 0x0102_1997];

impl StreamEvent for WatchEvent {
    fn encode(&self, codec: Codec) -> Vec<u8> {
        codec.encode(&WatchDirResponse { event: Some(self.clone()) })
    }

    fn keepalive() -> Self {
        WatchEvent::Keepalive(Empty {})
    }
}

struct Polled {
    events: Arc<Mutex<VecDeque<FilesystemEvent>>>,
    task: AbortHandle,
}

#[derive(Default)]
struct State {
    polled: HashMap<String, Polled>,
    next: u64,
}

#[derive(Default)]
pub struct Watchers(Mutex<State>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn open(app: Arc<App>, headers: HeaderMap, request: WatchRequest) -> Result<Watch, RpcError> {
    let (path, recursive) = (request.path, request.recursive);
    let (include_entry, network) = (request.include_entry, request.allow_network_mounts);
    // Registration with the event loop needs its context, also on a blocking thread.
    let runtime = tokio::runtime::Handle::current();
    with_user(app, headers, move |app, user| {
        let path = resolve(app, user, &path)?;
        let meta = std::fs::metadata(&path).map_err(|e| RpcError::io(&path, &e))?;
        if !meta.is_dir() {
            return err(Code::InvalidArgument, format!("path is not a directory: {path}"));
        }
        if !network && on_network(&path) {
            let message = format!("cannot watch path on network filesystem: {path}");
            return err(Code::InvalidArgument, message);
        }
        let _context = runtime.enter();
        Watch::new(path.clone(), recursive, include_entry).map_err(|e| RpcError::io(&path, &e))
    })
    .await
}

fn on_network(path: &str) -> bool {
    let Ok(path) = std::ffi::CString::new(path) else { return false };
    // SAFETY: `stat` is plain data, filled by the call.
    let magic = unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        if libc::statfs(path.as_ptr(), &mut stat) < 0 {
            return false;
        }
        stat.f_type
    };
    NETWORK.contains(&magic)
}

pub async fn watch_dir(
    app: Arc<App>,
    headers: HeaderMap,
    request: WatchRequest,
) -> Result<mpsc::Receiver<WatchEvent>, RpcError> {
    let mut watch = open(app, headers, request).await?;
    let (tx, rx) = mpsc::channel(64);
    tokio::spawn(async move {
        if tx.send(WatchEvent::Start(Empty {})).await.is_err() {
            return;
        }
        while watch.open() {
            let batch = tokio::select! {
                batch = watch.next() => batch,
                () = tx.closed() => return,
            };
            let Ok(Some(events)) = batch else { return };
            for event in events {
                if tx.send(WatchEvent::Filesystem(event)).await.is_err() {
                    return;
                }
            }
        }
    });
    Ok(rx)
}

pub async fn create(app: Arc<App>, headers: HeaderMap, request: WatchRequest) -> Result<WatcherId, RpcError> {
    let mut watch = open(app.clone(), headers, request).await?;
    let events = Arc::new(Mutex::new(VecDeque::new()));
    let queue = events.clone();
    let task = tokio::spawn(async move {
        while watch.open() {
            let Ok(Some(batch)) = watch.next().await else { return };
            let mut queue = lock(&queue);
            queue.extend(batch);
            let excess = queue.len().saturating_sub(KEEP);
            queue.drain(..excess);
        }
    });
    let mut state = lock(&app.watchers.0);
    state.next += 1;
    let watcher_id = format!("w{}", state.next);
    let polled = Polled { events, task: task.abort_handle() };
    state.polled.insert(watcher_id.clone(), polled);
    Ok(WatcherId { watcher_id })
}

fn unknown(id: &str) -> RpcError {
    RpcError::new(Code::NotFound, format!("watcher with id {id} not found"))
}

impl Watchers {
    /// Takes what happened since the last call.
    pub fn events(&self, id: &str) -> Result<WatcherEvents, RpcError> {
        let state = lock(&self.0);
        let polled = state.polled.get(id).ok_or_else(|| unknown(id))?;
        let events = lock(&polled.events).drain(..).collect();
        Ok(WatcherEvents { events })
    }

    pub fn remove(&self, id: &str) -> Result<Empty, RpcError> {
        let polled = lock(&self.0).polled.remove(id).ok_or_else(|| unknown(id))?;
        polled.task.abort();
        Ok(Empty {})
    }
}
