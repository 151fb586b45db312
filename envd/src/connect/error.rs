//! Errors of calls: codes, their HTTP statuses, and the JSON that clients read.

use super::set_type;
use crate::codec::ObjWriter;
use crate::http::{Body, Response};
use hyper::StatusCode;
use std::io;

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

    pub fn json(&self) -> String {
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

pub fn invalid(message: String) -> RpcError {
    RpcError::new(Code::InvalidArgument, message)
}

pub fn deadline() -> RpcError {
    RpcError::new(Code::DeadlineExceeded, "the deadline of the request passed")
}
