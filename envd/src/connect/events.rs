//! The response body of a server stream.

use super::deadline;
use super::envelope::{end_frame, put_envelope};
use crate::codec::Codec;
use bytes::{Bytes, BytesMut};
use hyper::body::Frame;
use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

/// Events already waiting are put into one frame up to about this many bytes.
const FRAME_TARGET: usize = 64 << 10;

/// An event of a server stream.
pub trait StreamEvent: Send + 'static {
    fn encode(&self, codec: Codec) -> Vec<u8>;
    fn keepalive() -> Self;
}

/// Body of a server stream: envelopes of the events, keepalives between them, one end-of-stream envelope. Dropping
/// it (the client went away) drops the receiver, which is how the sender learns of it.
pub struct EventBody<E> {
    rx: mpsc::Receiver<E>,
    codec: Codec,
    period: Duration,
    keepalive: Pin<Box<Sleep>>,
    deadline: Option<Pin<Box<Sleep>>>,
    done: bool,
}

impl<E> EventBody<E> {
    pub fn new(rx: mpsc::Receiver<E>, codec: Codec, period: Duration, deadline: Option<Instant>) -> Self {
        let keepalive = Box::pin(tokio::time::sleep(period));
        let deadline = deadline.map(|at| Box::pin(tokio::time::sleep_until(at)));
        EventBody { rx, codec, period, keepalive, deadline, done: false }
    }
}

impl<E: StreamEvent> hyper::body::Body for EventBody<E> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        if this.done {
            return Poll::Ready(None);
        }
        let mut out = BytesMut::new();
        while out.len() < FRAME_TARGET {
            match this.rx.poll_recv(cx) {
                Poll::Pending => break,
                Poll::Ready(Some(event)) => put_envelope(&mut out, 0, &event.encode(this.codec)),
                Poll::Ready(None) => {
                    out.extend_from_slice(&end_frame(None));
                    this.done = true;
                    break;
                }
            }
        }
        if !this.done {
            if let Some(deadline_at) = &mut this.deadline {
                if deadline_at.as_mut().poll(cx).is_ready() {
                    out.extend_from_slice(&end_frame(Some(&deadline())));
                    this.done = true;
                }
            }
        }
        if out.is_empty() && this.keepalive.as_mut().poll(cx).is_ready() {
            put_envelope(&mut out, 0, &E::keepalive().encode(this.codec));
            this.keepalive.as_mut().reset(Instant::now() + this.period);
            // Registers the timer again; it cannot be due already.
            let _ = this.keepalive.as_mut().poll(cx);
        }
        if out.is_empty() {
            return Poll::Pending;
        }
        Poll::Ready(Some(Ok(Frame::data(out.freeze()))))
    }

    fn is_end_stream(&self) -> bool {
        self.done
    }
}
