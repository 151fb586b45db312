//! HTTP surface: bodies, the router, authentication, and plain JSON errors.

use crate::app::App;
use crate::auth;
use crate::connect::{err, Code, RpcError};
use crate::request_body::{Connection, RequestBody};
use crate::{compose, control, download, filesystem, init, metrics, process, tunnel, upload};
use bytes::Bytes;
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::header::{HeaderValue, CONNECTION, CONTENT_TYPE};
use hyper::{Method, StatusCode, Version};
use std::borrow::Cow;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

pub type Request = hyper::Request<RequestBody>;
pub type Response = hyper::Response<Body>;
type BoxBody = Pin<Box<dyn hyper::body::Body<Data = Bytes, Error = io::Error> + Send>>;

/// A response body: all at once, or a stream.
pub enum Body {
    Full(Option<Bytes>),
    Stream(BoxBody),
}

impl Body {
    pub fn empty() -> Body {
        Body::Full(None)
    }

    pub fn full(data: impl Into<Bytes>) -> Body {
        Body::Full(Some(data.into()).filter(|d| !d.is_empty()))
    }

    pub fn stream(body: impl hyper::body::Body<Data = Bytes, Error = io::Error> + Send + 'static) -> Body {
        Body::Stream(Box::pin(body))
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            Body::Full(data) => Poll::Ready(data.take().map(|d| Ok(Frame::data(d)))),
            Body::Stream(body) => body.as_mut().poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Body::Full(data) => data.is_none(),
            Body::Stream(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Full(data) => SizeHint::with_exact(data.as_ref().map_or(0, Bytes::len) as u64),
            Body::Stream(body) => body.size_hint(),
        }
    }
}

/// An error of the plain HTTP endpoints: `{"code": STATUS, "message": TEXT}`.
#[derive(Debug)]
pub struct HttpError {
    pub status: StatusCode,
    pub message: String,
}

impl HttpError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let message = message.into();
        HttpError { status, message }
    }

    pub fn bad(message: impl Into<String>) -> Self {
        HttpError::new(StatusCode::BAD_REQUEST, message)
    }

    /// Maps an OS error on `path` to a status of the API.
    pub fn io(path: &str, e: &io::Error) -> Self {
        let (status, message) = match e.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => {
                let status = StatusCode::INSUFFICIENT_STORAGE;
                return HttpError::new(status, "not enough disk space available");
            }
            Some(libc::ENOENT) => {
                return HttpError::new(StatusCode::NOT_FOUND, format!("path '{path}' does not exist"));
            }
            Some(libc::EISDIR) => {
                return HttpError::bad(format!("path '{path}' is a directory"));
            }
            Some(libc::ENOTDIR | libc::EINVAL | libc::ENAMETOOLONG | libc::ELOOP) => {
                (StatusCode::BAD_REQUEST, crate::connect::os_message(e))
            }
            _ => (StatusCode::INTERNAL_SERVER_ERROR, crate::connect::os_message(e)),
        };
        HttpError::new(status, format!("error accessing '{path}': {message}"))
    }

    fn response(&self) -> Response {
        let body = serde_json::json!({"code": self.status.as_u16(), "message": self.message});
        let mut response = json(body.to_string());
        *response.status_mut() = self.status;
        response
    }
}

impl From<RpcError> for HttpError {
    fn from(e: RpcError) -> Self {
        HttpError::new(e.code.status(), e.message)
    }
}

pub fn json(text: impl Into<Bytes>) -> Response {
    let mut response = Response::new(Body::full(text));
    let value = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, value);
    response
}

pub fn no_content() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

/// Decoded query parameters, in order.
pub struct Query(Vec<(String, String)>);

impl Query {
    pub fn of(request: &Request) -> Query {
        Query::parse(request.uri().query().unwrap_or_default())
    }

    fn parse(text: &str) -> Query {
        let pairs = text.split('&').filter(|p| !p.is_empty()).map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (percent_decode(key), percent_decode(value))
        });
        Query(pairs.collect())
    }

    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }
}

fn percent_decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let hex = |at: usize| bytes.get(at).and_then(|b| (*b as char).to_digit(16));
        match (bytes[i], hex(i + 1), hex(i + 2)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                i += 2;
            }
            (b'+', ..) => out.push(b' '),
            (b, ..) => out.push(b),
        }
        i += 1;
    }
    match String::from_utf8_lossy(&out) {
        Cow::Borrowed(_) => String::from_utf8(out).unwrap_or_default(),
        Cow::Owned(lossy) => lossy,
    }
}

/// Answers one request; every error has become a response here.
pub async fn handle(
    app: Arc<App>,
    connection: Arc<Connection>,
    request: hyper::Request<Incoming>,
) -> Response {
    let http1 = request.version() < Version::HTTP_2;
    let (parts, body) = request.into_parts();
    let body = RequestBody::new(body, &parts.headers, http1, connection.clone());
    let mut response = route(app, Request::from_parts(parts, body)).await;
    if http1 && connection.closing() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

async fn route(app: Arc<App>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let rpc = path.starts_with("/process.Process/") || path.starts_with("/filesystem.Filesystem/");
    if path != "/health" {
        if let Err(e) = auth::check(&app, &request) {
            return if rpc { e.response() } else { HttpError::from(e).response() };
        }
    }
    if rpc {
        if request.method() != Method::POST {
            return method_not_allowed();
        }
        return match path.strip_prefix("/process.Process/") {
            Some(method) => process::call(app, method, request).await,
            None => {
                let method = path.trim_start_matches("/filesystem.Filesystem/");
                filesystem::call(app, method, request).await
            }
        };
    }
    let get = matches!(*request.method(), Method::GET | Method::HEAD);
    let post = request.method() == Method::POST;
    let result = match path.as_str() {
        "/health" if get => Ok(no_content()),
        "/files" if get => download::get(app, request).await,
        "/files" if post => upload::post(app, request).await,
        "/files/compose" if post => compose::post(app, request).await,
        "/init" if post => init::post(app, request).await,
        "/envs" if get => Ok(app.envs_response()),
        "/metrics" if get => metrics::get(app).await,
        "/tunnel" if get => tunnel::get(request).await,
        "/freeze" | "/unfreeze" | "/fsfreeze" | "/fsthaw" | "/collapse" if post => {
            control::post(app, &path, Query::of(&request)).await
        }
        "/health" | "/files" | "/files/compose" | "/init" | "/envs" | "/metrics" | "/tunnel" => {
            return method_not_allowed();
        }
        _ => Err(HttpError::new(StatusCode::NOT_FOUND, format!("no such endpoint: {path}"))),
    };
    result.unwrap_or_else(|e| e.response())
}

fn method_not_allowed() -> Response {
    HttpError::new(StatusCode::METHOD_NOT_ALLOWED, "method not allowed").response()
}

/// Answer to an unknown RPC method.
pub fn unknown_method(method: &str) -> Response {
    RpcError::new(Code::Unimplemented, format!("unknown method {method}")).response()
}

/// Reads a small JSON request body.
pub async fn read_body(body: RequestBody, limit: u64) -> Result<Bytes, HttpError> {
    use http_body_util::BodyExt as _;
    if body.size_hint().lower() > limit {
        return Err(HttpError::new(StatusCode::PAYLOAD_TOO_LARGE, "the request is too large"));
    }
    let limited = http_body_util::Limited::new(body, limit as usize);
    let collected = limited.collect().await;
    let data = collected.map_err(|e| HttpError::bad(format!("reading the request: {e}")))?;
    Ok(data.to_bytes())
}

/// Runs file system work off the event loop: a slow disk must not delay other requests.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, RpcError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => Ok(value),
        Err(e) => err(Code::Internal, format!("worker failed: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_parameters() {
        let q = Query::parse("path=%2Fa%20b+c&username=&x=%zz&path=second&%C3%A9=1");
        assert_eq!(q.get("path"), Some("/a b c"));
        assert_eq!(q.get("username"), Some(""));
        assert_eq!(q.get("x"), Some("%zz"));
        assert_eq!(q.get("é"), Some("1"));
        assert_eq!(q.get("none"), None);
    }
}
