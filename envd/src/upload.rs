//! `POST /files`: multipart and raw uploads, streamed to disk in constant memory.

use crate::app::App;
use crate::filesystem::entry::{base_name, set_metadata};
use crate::filesystem::{make_dirs, own};
use crate::http::{blocking, json, HttpError, Query, Request, Response};
use crate::multipart::{boundary, Event, Parser};
use crate::request_body::RequestBody;
use crate::users::User;
use bytes::{Bytes, BytesMut};
use flate2::write::MultiGzDecoder;
use http_body_util::BodyExt as _;
use hyper::header::{HeaderMap, CONTENT_ENCODING, CONTENT_TYPE};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;

/// Received bytes are collected up to this size before they are written on a blocking thread.
const BUFFER: usize = 512 << 10;
/// Smaller pieces are copied together: keeping each costs more, and keeps the larger memory it came in.
const SMALL: usize = 16 << 10;
/// Compressed bytes taken at a time: a byte may stand for a thousand.
const SLICE: usize = 1 << 10;
/// Limits of metadata (the specification's numbers): one key, and all together with the prefix counted per key.
const MAX_KEY: usize = 246;
const MAX_METADATA: usize = 4096;
const PREFIX_LENGTH: usize = "user.e2b.".len();

pub async fn post(app: Arc<App>, request: Request) -> Result<Response, HttpError> {
    let query = Query::of(&request);
    let (parts, body) = request.into_parts();
    let username = query.get("username").map(str::to_owned);
    let worker = app.clone();
    let user = blocking(move || worker.user(username.as_deref())).await??;
    let metadata = metadata_of(&parts.headers)?;
    let target = Target { app, user: Arc::new(user), metadata: Arc::new(metadata) };
    let path = query.get("path").filter(|p| !p.is_empty());
    let content_type = parts.headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let content_type = content_type.unwrap_or_default();
    let source = Source::new(body, &parts.headers)?;
    let written = if content_type.to_ascii_lowercase().starts_with("multipart/") {
        let boundary =
            boundary(content_type).ok_or_else(|| HttpError::bad("invalid multipart content type"))?;
        receive_multipart(source, &boundary, path, &target).await?
    } else {
        let path = path.ok_or_else(|| HttpError::bad("the query parameter 'path' is required"))?;
        vec![receive_raw(source, target.writer(path)?).await?]
    };
    Ok(json(serde_json::Value::Array(written).to_string()))
}

/// Metadata from `X-Metadata-*` headers; of repeated ones the first counts.
fn metadata_of(headers: &HeaderMap) -> Result<HashMap<String, String>, HttpError> {
    let mut found = HashMap::new();
    let mut total = 0;
    for name in headers.keys() {
        let Some(key) = name.as_str().strip_prefix("x-metadata-") else { continue };
        let value = headers.get(name).and_then(|v| v.to_str().ok());
        let printable = |c: char| (' '..='~').contains(&c);
        let Some(value) = value.filter(|v| v.chars().all(printable)) else {
            return Err(HttpError::bad(format!("metadata '{key}': only printable US-ASCII is allowed")));
        };
        if key.is_empty() || key.len() > MAX_KEY {
            let message = format!("metadata keys must have 1 to {MAX_KEY} bytes, not {}", key.len());
            return Err(HttpError::bad(message));
        }
        total += PREFIX_LENGTH + key.len() + value.len();
        found.insert(key.to_owned(), value.to_owned());
    }
    if total > MAX_METADATA {
        let message = format!("metadata takes {total} bytes, more than the {MAX_METADATA} allowed");
        return Err(HttpError::bad(message));
    }
    Ok(found)
}

/// The request body, decompressed.
struct Source {
    body: RequestBody,
    gzip: Option<MultiGzDecoder<Vec<u8>>>,
    /// Received and not decompressed.
    compressed: Bytes,
}

impl Source {
    fn new(body: RequestBody, headers: &HeaderMap) -> Result<Source, HttpError> {
        let encoding = headers.get(CONTENT_ENCODING).and_then(|v| v.to_str().ok());
        let gzip = match encoding.unwrap_or("identity") {
            "identity" | "" => None,
            "gzip" => Some(MultiGzDecoder::new(Vec::new())),
            other => return Err(HttpError::bad(format!("unsupported Content-Encoding: {other}"))),
        };
        Ok(Source { body, gzip, compressed: Bytes::new() })
    }

    /// The next bytes; `None` at the end. May be empty.
    async fn next(&mut self) -> Result<Option<Bytes>, HttpError> {
        let invalid = |e: io::Error| HttpError::bad(format!("invalid gzip body: {e}"));
        loop {
            if let Some(gzip) = self.gzip.as_mut().filter(|_| !self.compressed.is_empty()) {
                while !self.compressed.is_empty() && gzip.get_ref().len() < BUFFER {
                    let slice = self.compressed.split_to(self.compressed.len().min(SLICE));
                    gzip.write_all(&slice).map_err(invalid)?;
                }
                return Ok(Some(std::mem::take(gzip.get_mut()).into()));
            }
            let Some(frame) = self.body.frame().await else {
                let Some(mut gzip) = self.gzip.take() else { return Ok(None) };
                gzip.try_finish().map_err(invalid)?;
                return Ok(Some(std::mem::take(gzip.get_mut()).into()));
            };
            let frame = frame.map_err(|e| HttpError::bad(format!("reading the body: {e}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if self.gzip.is_none() {
                return Ok(Some(data));
            }
            self.compressed = data;
        }
    }
}

/// Whose files are written, and with what metadata.
struct Target {
    app: Arc<App>,
    user: Arc<User>,
    metadata: Arc<HashMap<String, String>>,
}

impl Target {
    fn writer(&self, path: &str) -> Result<Writer, HttpError> {
        let path = self.app.resolve(path, &self.user).map_err(HttpError::bad)?;
        Ok(Writer {
            path,
            user: self.user.clone(),
            metadata: self.metadata.clone(),
            buffer: Buffer::default(),
            file: None,
        })
    }
}

/// Received bytes that wait to be written: large pieces as they came, small ones together.
#[derive(Default)]
struct Buffer {
    pieces: Vec<Bytes>,
    small: BytesMut,
    length: usize,
}

impl Buffer {
    fn push(&mut self, data: Bytes) {
        self.length += data.len();
        if data.len() < SMALL {
            self.small.extend_from_slice(&data);
        } else {
            self.seal();
            self.pieces.push(data);
        }
    }

    fn seal(&mut self) {
        if !self.small.is_empty() {
            self.pieces.push(self.small.split().freeze());
        }
    }

    fn write(&mut self, file: &mut File) -> io::Result<()> {
        self.seal();
        self.length = 0;
        self.pieces.drain(..).try_for_each(|piece| file.write_all(&piece))
    }
}

/// One file being written.
struct Writer {
    path: String,
    user: Arc<User>,
    metadata: Arc<HashMap<String, String>>,
    buffer: Buffer,
    /// Opened by the first write.
    file: Option<File>,
}

impl Writer {
    async fn push(mut self, data: Bytes) -> Result<Writer, HttpError> {
        self.buffer.push(data);
        if self.buffer.length < BUFFER {
            return Ok(self);
        }
        blocking(move || self.flush().map(|()| self)).await?
    }

    /// Writes the rest and describes the file. A small file takes this one trip to a blocking thread.
    async fn finish(mut self) -> Result<serde_json::Value, HttpError> {
        blocking(move || {
            self.flush()?;
            set_metadata(&self.path, &self.metadata).map_err(|e| HttpError::io(&self.path, &e))?;
            let mut entry =
                serde_json::json!({"name": base_name(&self.path), "type": "file", "path": self.path});
            if !self.metadata.is_empty() {
                entry["metadata"] = serde_json::json!(*self.metadata);
            }
            Ok(entry)
        })
        .await?
    }

    fn flush(&mut self) -> Result<(), HttpError> {
        let path = self.path.clone();
        let failed = |e: io::Error| HttpError::io(&path, &e);
        let mut file = match self.file.take() {
            Some(file) => file,
            None => self.open().map_err(failed)?,
        };
        self.buffer.write(&mut file).map_err(failed)?;
        self.file = Some(file);
        Ok(())
    }

    fn open(&self) -> io::Result<File> {
        let path = Path::new(&self.path);
        let open = || {
            let mut options = File::options();
            options.write(true).create(true).truncate(true);
            // Without O_NONBLOCK, a named pipe nobody reads would hold the thread for ever.
            options.mode(0o644).custom_flags(libc::O_NONBLOCK).open(path)
        };
        let file = match (open(), path.parent()) {
            (Err(e), Some(parent)) if e.kind() == io::ErrorKind::NotFound => {
                make_dirs(parent, &self.user)?;
                open()?
            }
            (result, _) => result?,
        };
        own(path, &self.user)?;
        Ok(file)
    }
}

async fn receive_raw(mut source: Source, mut writer: Writer) -> Result<serde_json::Value, HttpError> {
    while let Some(data) = source.next().await? {
        writer = writer.push(data).await?;
    }
    writer.finish().await
}

/// Every `file` part becomes a file: at `path` when the query names one, else at the part's own file name.
async fn receive_multipart(
    mut source: Source,
    boundary: &str,
    path: Option<&str>,
    target: &Target,
) -> Result<Vec<serde_json::Value>, HttpError> {
    let mut parser = Parser::new(boundary);
    let mut written = Vec::new();
    let mut seen: Vec<String> = Vec::new();
    let mut current: Option<Writer> = None;
    while let Some(data) = source.next().await? {
        for event in parser.push(data).map_err(HttpError::bad)? {
            match event {
                Event::Part { name, filename } => {
                    // Other fields of a form are not ours.
                    if name != "file" {
                        continue;
                    }
                    let named = path.map(str::to_owned).or(filename).filter(|n| !n.is_empty());
                    let Some(named) = named else {
                        return Err(HttpError::bad("a file part has no file name and no 'path' is given"));
                    };
                    let writer = target.writer(&named)?;
                    if seen.contains(&writer.path) {
                        let message =
                            format!("you cannot upload multiple files to the same path '{}'", writer.path);
                        return Err(HttpError::bad(message));
                    }
                    seen.push(writer.path.clone());
                    current = Some(writer);
                }
                Event::Data(data) => {
                    if let Some(writer) = current.take() {
                        current = Some(writer.push(data).await?);
                    }
                }
                Event::PartEnd => {
                    if let Some(writer) = current.take() {
                        written.push(writer.finish().await?);
                    }
                }
            }
        }
    }
    if !parser.done() {
        return Err(HttpError::bad("the multipart body ends before its final boundary"));
    }
    Ok(written)
}
