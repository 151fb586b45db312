//! `GET /files`.

use crate::app::App;
use crate::http::{blocking, Body, HttpError, Query, Request, Response};
use crate::range::{choose_encoding, parse_range, Encoding, Range};
use bytes::Bytes;
use flate2::write::GzEncoder;
use flate2::Compression;
use hyper::body::{Frame, SizeHint};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::header::{
    ACCEPT_ENCODING, ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_RANGE, CONTENT_TYPE, ETAG,
    IF_NONE_MATCH, LAST_MODIFIED, RANGE, VARY,
};
use hyper::{Method, StatusCode};
use std::fs::{File, Metadata};
use std::future::Future as _;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::task::JoinHandle;

const CHUNK: u64 = 256 << 10;

pub async fn get(app: Arc<App>, request: Request) -> Result<Response, HttpError> {
    let query = Query::of(&request);
    let path = query.get("path").unwrap_or_default().to_owned();
    let username = query.get("username").map(str::to_owned);
    let headers = request.headers().clone();
    let head = request.method() == Method::HEAD;
    blocking(move || {
        let user = app.user(username.as_deref())?;
        let path = app.resolve(&path, &user).map_err(HttpError::bad)?;
        respond(&path, &headers, head)
    })
    .await?
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name).and_then(|v| v.to_str().ok())
}

/// Opens the file and prepares the response, with the first chunk already read.
fn respond(path: &str, headers: &HeaderMap, head: bool) -> Result<Response, HttpError> {
    // Without O_NONBLOCK, opening a named pipe would wait for its writer.
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let mut file = opened.map_err(|e| HttpError::io(path, &e))?;
    let meta = file.metadata().map_err(|e| HttpError::io(path, &e))?;
    if meta.is_dir() {
        return Err(HttpError::bad(format!("path '{path}' is a directory")));
    }
    if !meta.is_file() {
        return Err(HttpError::bad(format!("path '{path}' is not a regular file")));
    }
    let etag = format!("\"{:x}-{:x}-{:x}\"", meta.mtime(), meta.mtime_nsec(), meta.len());
    if text(headers, IF_NONE_MATCH).is_some_and(|v| v.split(',').any(|t| t.trim() == etag)) {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        set(&mut response, ETAG, &etag);
        return Ok(response);
    }
    let range = parse_range(text(headers, RANGE), meta.len());
    let encoding = match (&range, choose_encoding(text(headers, ACCEPT_ENCODING))) {
        (_, Encoding::NotAcceptable) => {
            let message = "no acceptable encoding found, supported: [identity, gzip]";
            return Err(HttpError::new(StatusCode::NOT_ACCEPTABLE, message));
        }
        (Range::Part(..), _) => Encoding::Identity,
        (_, encoding) => encoding,
    };
    let (status, first, length) = match range {
        Range::Whole => (StatusCode::OK, 0, meta.len()),
        Range::Part(first, last) => (StatusCode::PARTIAL_CONTENT, first, last - first + 1),
        Range::Unsatisfiable => {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::RANGE_NOT_SATISFIABLE;
            set(&mut response, CONTENT_RANGE, &format!("bytes */{}", meta.len()));
            return Ok(response);
        }
    };
    let gzip = (encoding == Encoding::Gzip).then(|| GzEncoder::new(Vec::new(), Compression::fast()));
    let compressed = gzip.is_some();
    file.seek(SeekFrom::Start(first)).map_err(|e| HttpError::io(path, &e))?;
    let mut reader = Reader { file, left: length, gzip };
    let body = if head {
        Body::empty()
    } else {
        let chunk = reader.read().map_err(|e| HttpError::io(path, &e))?;
        if reader.finished() {
            Body::full(chunk)
        } else {
            let size = (!compressed).then_some(length);
            Body::stream(FileBody { first: Some(chunk), state: State::Idle(Some(reader)), size })
        }
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    describe(&mut response, path, &meta, &etag);
    if status == StatusCode::PARTIAL_CONTENT {
        let value = format!("bytes {first}-{}/{}", first + length - 1, meta.len());
        set(&mut response, CONTENT_RANGE, &value);
    }
    if compressed {
        set(&mut response, CONTENT_ENCODING, "gzip");
    } else if head {
        set(&mut response, hyper::header::CONTENT_LENGTH, &length.to_string());
    }
    Ok(response)
}

fn set(response: &mut Response, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

fn describe(response: &mut Response, path: &str, meta: &Metadata, etag: &str) {
    set(response, CONTENT_TYPE, "application/octet-stream");
    set(response, ACCEPT_RANGES, "bytes");
    set(response, VARY, "Accept-Encoding");
    set(response, ETAG, etag);
    if let Ok(time) = meta.modified() {
        set(response, LAST_MODIFIED, &httpdate::fmt_http_date(time));
    }
    let name = crate::filesystem::entry::base_name(path);
    set(response, CONTENT_DISPOSITION, &disposition(name));
}

/// `inline; filename="…"`, with the RFC 5987 form for names that are not plain ASCII.
fn disposition(name: &str) -> String {
    let plain = |c: char| (' '..='~').contains(&c) && c != '"' && c != '\\';
    if name.chars().all(plain) {
        return format!("inline; filename=\"{name}\"");
    }
    let mut encoded = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(byte as char);
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    format!("inline; filename*=utf-8''{encoded}")
}

struct Reader {
    file: File,
    left: u64,
    /// Its buffer holds what is compressed and not sent.
    gzip: Option<GzEncoder<Vec<u8>>>,
}

impl Reader {
    fn finished(&self) -> bool {
        self.left == 0
    }

    /// The next chunk, never empty unless it is the last. A file that shrank ends with an error, not short.
    fn read(&mut self) -> io::Result<Bytes> {
        loop {
            let size = self.left.min(CHUNK);
            let mut chunk = Vec::with_capacity(size as usize);
            let n = (&mut self.file).take(size).read_to_end(&mut chunk)? as u64;
            if n < size {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.left -= n;
            let Some(gzip) = &mut self.gzip else {
                return Ok(chunk.into());
            };
            gzip.write_all(&chunk)?;
            if self.left == 0 {
                gzip.try_finish()?;
            }
            let ready = std::mem::take(gzip.get_mut());
            if !ready.is_empty() || self.left == 0 {
                return Ok(ready.into());
            }
        }
    }
}

enum State {
    Idle(Option<Reader>),
    /// Reading on a blocking thread, which no slow client holds between chunks.
    Reading(JoinHandle<(Reader, io::Result<Bytes>)>),
}

struct FileBody {
    first: Option<Bytes>,
    state: State,
    size: Option<u64>,
}

impl hyper::body::Body for FileBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        if let Some(chunk) = this.first.take().filter(|c| !c.is_empty()) {
            return Poll::Ready(Some(Ok(Frame::data(chunk))));
        }
        loop {
            match &mut this.state {
                State::Idle(reader) => {
                    let Some(mut reader) = reader.take().filter(|r| !r.finished()) else {
                        return Poll::Ready(None);
                    };
                    this.state = State::Reading(tokio::task::spawn_blocking(move || {
                        let chunk = reader.read();
                        (reader, chunk)
                    }));
                }
                State::Reading(handle) => {
                    let (reader, chunk) = match Pin::new(handle).poll(cx) {
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready(Err(e)) => return Poll::Ready(Some(Err(io::Error::other(e)))),
                        Poll::Ready(Ok(done)) => done,
                    };
                    this.state = State::Idle(Some(reader).filter(|_| chunk.is_ok()));
                    return Poll::Ready(Some(chunk.map(Frame::data)));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let drained = self.first.as_ref().map_or(true, Bytes::is_empty);
        drained && matches!(&self.state, State::Idle(r) if r.as_ref().map_or(true, Reader::finished))
    }

    fn size_hint(&self) -> SizeHint {
        self.size.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dispositions() {
        assert_eq!(disposition("a b.txt"), "inline; filename=\"a b.txt\"");
        assert_eq!(disposition("é\"x"), "inline; filename*=utf-8''%C3%A9%22x");
    }
}
