//! Control endpoints around a pause: `/fsfreeze`, `/fsthaw`; the others are not provided.

use crate::app::App;
use crate::http::{blocking, no_content, HttpError, Query, Response};
use hyper::StatusCode;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

/// `FIFREEZE` and `FITHAW` of linux/fs.h.
const FIFREEZE: libc::c_ulong = 0xc004_5877;
const FITHAW: libc::c_ulong = 0xc004_5878;

pub async fn post(app: Arc<App>, path: &str, _query: Query) -> Result<Response, HttpError> {
    let (request, already) = match path {
        "/fsfreeze" => (FIFREEZE, libc::EBUSY),
        "/fsthaw" => (FITHAW, libc::EINVAL),
        _ => {
            let message = format!("{path} is not provided: the VM is stopped as a whole when it is paused");
            return Err(HttpError::new(StatusCode::NOT_IMPLEMENTED, message));
        }
    };
    if !app.options.pid1 {
        let message = format!("{path} is only available when envd is the guest's init");
        return Err(HttpError::new(StatusCode::NOT_IMPLEMENTED, message));
    }
    let result = blocking(move || {
        let root = File::open("/")?;
        let zero: libc::c_int = 0;
        // SAFETY: the ioctl takes an int that it does not use.
        match unsafe { libc::ioctl(root.as_raw_fd(), request as _, &zero) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    })
    .await?;
    match result {
        // Both are idempotent.
        Err(e) if e.raw_os_error() != Some(already) => Err(HttpError::io("/", &e)),
        _ => Ok(no_content()),
    }
}
