//! The body of a request, read to its end whatever becomes of the request.
//!
//! hyper closes a connection, and says so in no header, when a body is dropped before its end has arrived. That end
//! is often a packet of its own (the last chunk), so an answer that does not need it, an error say, would race with
//! it; the client would then put a dead connection back into its pool. So what a handler leaves of a body is read by
//! a task, and the connection can carry the next request. Where that would be too much the response says
//! `Connection: close`.

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{HeaderMap, EXPECT};
use std::error::Error as _;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::task::{ready, Context, Poll};
use tokio::sync::Notify;

/// Most that is read of what nobody wants. Below it a client that is still sending sees the answer, not a reset.
const MAX_DRAIN: u64 = 1 << 30;

/// What the bodies of one HTTP/1 connection tell its server.
#[derive(Default)]
pub struct Connection {
    closing: AtomicBool,
    gone: Notify,
}

impl Connection {
    /// Whether the rest of a body will not be read, so that no request can follow.
    pub fn closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Resolves when the client went away in the middle of a body that is not needed for the answer under way.
    pub async fn gone(&self) {
        self.gone.notified().await;
    }
}

pub struct RequestBody {
    /// `None` once it ended.
    incoming: Option<Incoming>,
    connection: Arc<Connection>,
    /// The client sends only when asked (`Expect: 100-continue`), which the first read does.
    unasked: bool,
    /// Only HTTP/1 has to see the end; HTTP/2 ends streams one by one.
    drain: bool,
}

impl RequestBody {
    pub fn new(incoming: Incoming, headers: &HeaderMap, http1: bool, connection: Arc<Connection>) -> Self {
        let unasked = headers.contains_key(EXPECT);
        RequestBody { incoming: Some(incoming), connection, unasked, drain: http1 }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        let Some(incoming) = &mut this.incoming else {
            return Poll::Ready(None);
        };
        this.unasked = false;
        let frame = ready!(Pin::new(incoming).poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            this.incoming = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().map_or(true, Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        let Some(rest) = self.incoming.take().filter(|b| self.drain && !b.is_end_stream()) else {
            return;
        };
        if self.unasked || rest.size_hint().lower() > MAX_DRAIN {
            self.connection.closing.store(true, Ordering::Relaxed);
        } else if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(drain(rest, self.connection.clone()));
        }
    }
}

async fn drain(mut rest: Incoming, connection: Arc<Connection>) {
    use http_body_util::BodyExt as _;
    let mut left = MAX_DRAIN;
    while let Some(frame) = rest.frame().await {
        match frame {
            Ok(frame) => {
                let size = frame.data_ref().map_or(0, Bytes::len) as u64;
                match left.checked_sub(size) {
                    Some(rest) => left = rest,
                    None => return,
                }
            }
            Err(e) => {
                let cause = e.source().and_then(|e| e.downcast_ref::<io::Error>()).map(io::Error::kind);
                // hyper notices no end of input once a body has failed: a silent stream would live on.
                if cause != Some(io::ErrorKind::InvalidInput) && cause != Some(io::ErrorKind::InvalidData) {
                    connection.gone.notify_one();
                }
                return;
            }
        }
    }
}
