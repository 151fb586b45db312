//! The Connect protocol: errors, envelopes, and the response bodies of unary calls and streams.

use crate::codec::{write_str, Codec, Decode, Encode, ObjWriter};
use crate::http::{Body, Request, Response};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::{Frame, Incoming};
use hyper::header::{HeaderMap, HeaderValue, CONTENT_ENCODING, CONTENT_TYPE};
use hyper::StatusCode;
use std::future::Future;
use std::io::{self, Read as _};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

/// Largest message accepted; the guest's memory is small and inputs are streamed in pieces.
const MAX_MESSAGE: usize = 64 << 20;
/// Events already waiting are put into one frame up to about this many bytes.
const FRAME_TARGET: usize = 64 << 10;
const END_STREAM: u8 = 2;
const COMPRESSED: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Unimplemented,
    Internal,
    Unauthenticated,
}

impl Code {
    pub fn name(self) -> &'static str {
        match self {
            Code::InvalidArgument => "invalid_argument",
            Code::DeadlineExceeded => "deadline_exceeded",
            Code::NotFound => "not_found",
            Code::AlreadyExists => "already_exists",
            Code::PermissionDenied => "permission_denied",
            Code::ResourceExhausted => "resource_exhausted",
            Code::FailedPrecondition => "failed_precondition",
            Code::Unimplemented => "unimplemented",
            Code::Internal => "internal",
            Code::Unauthenticated => "unauthenticated",
        }
    }

    /// HTTP status of a unary error, as the Connect specification maps it.
    pub fn status(self) -> StatusCode {
        match self {
            Code::InvalidArgument | Code::FailedPrecondition => StatusCode::BAD_REQUEST,
            Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::AlreadyExists => StatusCode::CONFLICT,
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Code::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        }
    }
}

#[derive(Clone, Debug)]
pub struct RpcError {
    pub code: Code,
    pub message: String,
}

pub fn err<T>(code: Code, message: impl Into<String>) -> Result<T, RpcError> {
    Err(RpcError::new(code, message))
}

impl RpcError {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        let message = message.into();
        RpcError { code, message }
    }

    /// Maps an OS error on `path` to the code its kind deserves.
    pub fn io(path: &str, e: &io::Error) -> Self {
        let code = match e.raw_os_error() {
            Some(libc::ENOENT) => Code::NotFound,
            Some(libc::EEXIST) => Code::AlreadyExists,
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => Code::PermissionDenied,
            Some(libc::ENOTDIR | libc::EINVAL | libc::ENAMETOOLONG | libc::EISDIR | libc::ELOOP) => {
                Code::InvalidArgument
            }
            Some(libc::ENOTEMPTY) => Code::FailedPrecondition,
            Some(libc::ENOSPC | libc::EDQUOT) => Code::ResourceExhausted,
            _ => Code::Internal,
        };
        RpcError::new(code, format!("{path}: {}", os_message(e)))
    }

    fn json(&self) -> String {
        let mut out = String::new();
        let mut w = ObjWriter::new(&mut out);
        w.str("code", self.code.name());
        w.str("message", &self.message);
        w.end();
        out
    }

    pub fn response(&self) -> Response {
        let mut response = Response::new(Body::full(self.json()));
        *response.status_mut() = self.code.status();
        set_type(&mut response, "application/json");
        response
    }
}

/// The error text without Rust's "(os error N)".
pub fn os_message(e: &io::Error) -> String {
    let text = e.to_string();
    match text.find(" (os error") {
        Some(at) => text[..at].to_lowercase(),
        None => text,
    }
}

fn set_type(response: &mut Response, content_type: &'static str) {
    let value = HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, value);
}

/// The codec of a call, by its content type: `application/[connect+]{json,proto}`.
pub fn codec_of(headers: &HeaderMap, streaming: bool) -> Option<Codec> {
    let value = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let essence = value.split(';').next()?.trim().to_ascii_lowercase();
    let name = essence.strip_prefix("application/")?;
    let name = if streaming { name.strip_prefix("connect+")? } else { name };
    match name {
        "json" => Some(Codec::Json),
        "proto" => Some(Codec::Proto),
        _ => None,
    }
}

/// The time the client allows for a call (`Connect-Timeout-Ms`); zero or nonsense means no limit.
pub fn timeout_of(headers: &HeaderMap) -> Option<Duration> {
    let ms: u64 = headers.get("connect-timeout-ms")?.to_str().ok()?.parse().ok()?;
    (ms > 0).then(|| Duration::from_millis(ms))
}

pub fn keepalive_of(headers: &HeaderMap) -> Duration {
    let seconds = headers
        .get("keepalive-ping-interval")
        .and_then(|v| v.to_str().ok()?.trim().parse::<u64>().ok())
        .filter(|s| *s > 0);
    Duration::from_secs(seconds.unwrap_or(90).min(86_400))
}

/// Runs one unary call: decode, `handler`, encode; errors become Connect error JSON.
pub async fn unary<Req, Res, F>(request: Request, handler: impl FnOnce(HeaderMap, Req) -> F) -> Response
where
    Req: Decode,
    Res: Encode,
    F: Future<Output = Result<Res, RpcError>>,
{
    let (parts, body) = request.into_parts();
    let Some(codec) = codec_of(&parts.headers, false) else {
        return unsupported_type();
    };
    let timeout = timeout_of(&parts.headers);
    let call = async {
        let gzip = parts.headers.get(CONTENT_ENCODING).is_some_and(|v| v == "gzip");
        let data = read_all(body).await?;
        let data = if gzip { gunzip(&data)? } else { data };
        let message = codec.decode(&data).map_err(invalid)?;
        handler(parts.headers, message).await
    };
    let result = match timeout {
        None => call.await,
        Some(limit) => tokio::time::timeout(limit, call).await.unwrap_or_else(|_| Err(deadline())),
    };
    match result {
        Err(e) => e.response(),
        Ok(message) => {
            let mut response = Response::new(Body::full(codec.encode(&message)));
            let json = codec == Codec::Json;
            set_type(&mut response, if json { "application/json" } else { "application/proto" });
            response
        }
    }
}

/// Runs a server-streaming call: `handler` gets the request and gives the receiver of the events.
pub async fn server_stream<Req, E, F>(request: Request, handler: impl FnOnce(HeaderMap, Req) -> F) -> Response
where
    Req: Decode,
    E: StreamEvent,
    F: Future<Output = Result<mpsc::Receiver<E>, RpcError>>,
{
    let (parts, body) = request.into_parts();
    let Some(codec) = codec_of(&parts.headers, true) else {
        return unsupported_type();
    };
    let deadline = timeout_of(&parts.headers).map(|limit| Instant::now() + limit);
    let period = keepalive_of(&parts.headers);
    let first = async {
        let gzip = stream_gzip(&parts.headers);
        let mut reader = EnvelopeReader::new(body, gzip);
        let Some(data) = reader.next().await? else {
            return err(Code::InvalidArgument, "the request stream has no message");
        };
        let message = codec.decode(&data).map_err(invalid)?;
        handler(parts.headers, message).await
    };
    match first.await {
        Err(e) => stream_response(codec, Body::full(end_frame(Some(&e)))),
        Ok(rx) => {
            let events = EventBody {
                rx,
                codec,
                period,
                keepalive: Box::pin(tokio::time::sleep(period)),
                deadline: deadline.map(|at| Box::pin(tokio::time::sleep_until(at))),
                done: false,
            };
            stream_response(codec, Body::stream(events))
        }
    }
}

/// Runs a client-streaming call; `handler` pulls the messages itself.
pub async fn client_stream<Res, F>(
    request: Request,
    handler: impl FnOnce(Codec, EnvelopeReader) -> F,
) -> Response
where
    Res: Encode,
    F: Future<Output = Result<Res, RpcError>>,
{
    let (parts, body) = request.into_parts();
    let Some(codec) = codec_of(&parts.headers, true) else {
        return unsupported_type();
    };
    let reader = EnvelopeReader::new(body, stream_gzip(&parts.headers));
    let call = handler(codec, reader);
    let result = match timeout_of(&parts.headers) {
        None => call.await,
        Some(limit) => tokio::time::timeout(limit, call).await.unwrap_or_else(|_| Err(deadline())),
    };
    let body = match result {
        Err(e) => end_frame(Some(&e)),
        Ok(message) => {
            let mut out = BytesMut::new();
            put_envelope(&mut out, 0, &codec.encode(&message));
            out.extend_from_slice(&end_frame(None));
            out.freeze()
        }
    };
    stream_response(codec, Body::full(body))
}

fn stream_response(codec: Codec, body: Body) -> Response {
    let mut response = Response::new(body);
    let json = codec == Codec::Json;
    set_type(&mut response, if json { "application/connect+json" } else { "application/connect+proto" });
    response
}

fn unsupported_type() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    let accepted = "application/json, application/proto, application/connect+json, application/connect+proto";
    let value = HeaderValue::from_static(accepted);
    response.headers_mut().insert("accept-post", value);
    response
}

fn invalid(message: String) -> RpcError {
    RpcError::new(Code::InvalidArgument, message)
}

pub fn deadline() -> RpcError {
    RpcError::new(Code::DeadlineExceeded, "the deadline of the request passed")
}

fn stream_gzip(headers: &HeaderMap) -> bool {
    headers.get("connect-content-encoding").is_some_and(|v| v == "gzip")
}

async fn read_all(mut body: Incoming) -> Result<Bytes, RpcError> {
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| invalid(format!("reading the request: {e}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if first.is_empty() && rest.is_empty() {
            first = data;
            continue;
        }
        if rest.is_empty() {
            rest.extend_from_slice(&first);
        }
        rest.extend_from_slice(&data);
        if rest.len() > MAX_MESSAGE {
            return err(Code::ResourceExhausted, "the request is too large");
        }
    }
    Ok(if rest.is_empty() { first } else { rest.freeze() })
}

fn gunzip(data: &[u8]) -> Result<Bytes, RpcError> {
    let mut out = Vec::new();
    flate2::read::MultiGzDecoder::new(data)
        .take(MAX_MESSAGE as u64)
        .read_to_end(&mut out)
        .map_err(|e| invalid(format!("invalid gzip: {e}")))?;
    Ok(out.into())
}

/// Appends one envelope: flags, big-endian length, payload.
pub fn put_envelope(out: &mut BytesMut, flags: u8, payload: &[u8]) {
    out.reserve(5 + payload.len());
    out.put_u8(flags);
    out.put_u32(payload.len() as u32);
    out.put_slice(payload);
}

fn end_frame(error: Option<&RpcError>) -> Bytes {
    let mut json = String::from("{");
    if let Some(e) = error {
        write_str(&mut json, "error");
        json.push(':');
        json.push_str(&e.json());
    }
    json.push('}');
    let mut out = BytesMut::new();
    put_envelope(&mut out, END_STREAM, json.as_bytes());
    out.freeze()
}

/// Takes one whole envelope off the front of `buf`, if it is there.
pub fn take_envelope(buf: &mut BytesMut) -> Result<Option<(u8, Bytes)>, RpcError> {
    if buf.len() < 5 {
        return Ok(None);
    }
    let size = u32::from_be_bytes([buf[1], buf[2], buf[3], buf[4]]) as usize;
    if size > MAX_MESSAGE {
        return err(Code::ResourceExhausted, format!("message of {size} bytes is too large"));
    }
    if buf.len() < 5 + size {
        return Ok(None);
    }
    let flags = buf[0];
    buf.advance(5);
    Ok(Some((flags, buf.split_to(size).freeze())))
}

/// Reads enveloped messages from a request body.
pub struct EnvelopeReader {
    body: Incoming,
    buf: BytesMut,
    gzip: bool,
}

impl EnvelopeReader {
    fn new(body: Incoming, gzip: bool) -> Self {
        let buf = BytesMut::new();
        EnvelopeReader { body, buf, gzip }
    }

    /// The next message, or `None` at the end of the stream.
    pub async fn next(&mut self) -> Result<Option<Bytes>, RpcError> {
        loop {
            if let Some((flags, data)) = take_envelope(&mut self.buf)? {
                if flags & END_STREAM != 0 {
                    return Ok(None);
                }
                if flags & COMPRESSED == 0 {
                    return Ok(Some(data));
                }
                if !self.gzip {
                    return err(Code::InvalidArgument, "compressed message without a known encoding");
                }
                return gunzip(&data).map(Some);
            }
            match self.body.frame().await {
                None if self.buf.is_empty() => return Ok(None),
                None => return err(Code::InvalidArgument, "the stream ends inside a message"),
                Some(Err(e)) => return Err(invalid(format!("reading the request: {e}"))),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buf.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

/// An event of a server stream.
pub trait StreamEvent: Send + 'static {
    fn encode(&self, codec: Codec) -> Vec<u8>;
    fn keepalive() -> Self;
}

/// Body of a server stream: envelopes of the events, keepalives between them, one end-of-stream envelope. Dropping
/// it (the client went away) drops the receiver, which is how the sender learns of it.
struct EventBody<E> {
    rx: mpsc::Receiver<E>,
    codec: Codec,
    period: Duration,
    keepalive: Pin<Box<Sleep>>,
    deadline: Option<Pin<Box<Sleep>>>,
    done: bool,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_split_anywhere() {
        let mut whole = BytesMut::new();
        put_envelope(&mut whole, 0, b"hello");
        put_envelope(&mut whole, END_STREAM, b"{}");
        let mut buf = BytesMut::new();
        let mut seen = Vec::new();
        for byte in whole {
            buf.put_u8(byte);
            while let Some(envelope) = take_envelope(&mut buf).unwrap() {
                seen.push(envelope);
            }
        }
        assert_eq!(seen, [(0, "hello".into()), (END_STREAM, "{}".into())]);
        assert!(buf.is_empty());
    }

    #[test]
    fn refuses_huge_messages() {
        let mut buf = BytesMut::from(&b"\x00\xff\xff\xff\xff"[..]);
        let e = take_envelope(&mut buf).unwrap_err();
        assert_eq!(e.code, Code::ResourceExhausted);
    }

    #[test]
    fn end_frame_carries_the_error() {
        let frame = end_frame(Some(&RpcError::new(Code::NotFound, "no \"x\"")));
        assert_eq!(frame[0], END_STREAM);
        assert_eq!(&frame[5..], br#"{"error":{"code":"not_found","message":"no \"x\""}}"#);
    }

    #[test]
    fn codecs_by_content_type() {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/connect+json; charset=utf-8"));
        assert_eq!(codec_of(&headers, true), Some(Codec::Json));
        assert_eq!(codec_of(&headers, false), None);
    }
}
