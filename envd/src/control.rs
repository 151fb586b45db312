//! Control endpoints around a pause: `/freeze`, `/unfreeze`, `/fsfreeze`, `/fsthaw`; `/collapse` is not provided.

use crate::app::App;
use crate::http::{blocking, json, no_content, HttpError, Query, Response};
use hyper::StatusCode;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::Duration;

/// `FIFREEZE` and `FITHAW` of linux/fs.h.
const FIFREEZE: libc::c_ulong = 0xc004_5877;
const FITHAW: libc::c_ulong = 0xc004_5878;

pub async fn post(app: Arc<App>, path: &str, query: Query) -> Result<Response, HttpError> {
    match path {
        "/freeze" => freeze(&app, &query).await,
        "/unfreeze" => app.freezer.unfreeze().await.map(|()| no_content()),
        "/fsfreeze" => file_system(&app, path, FIFREEZE, libc::EBUSY).await,
        "/fsthaw" => file_system(&app, path, FITHAW, libc::EINVAL).await,
        _ => {
            let message = format!("{path} is not provided: envd's memory is smaller than a huge page");
            Err(HttpError::new(StatusCode::NOT_IMPLEMENTED, message))
        }
    }
}

/// With `maxWaitMs` the answer says what was seen to stop; without it the freeze is only issued.
async fn freeze(app: &App, query: &Query) -> Result<Response, HttpError> {
    let budget = max_wait(query.get("maxWaitMs"))?;
    let result = app.freezer.freeze(budget).await?;
    Ok(if budget.is_some() { json(result.json()) } else { no_content() })
}

/// A wait that is not positive is none.
fn max_wait(text: Option<&str>) -> Result<Option<Duration>, HttpError> {
    let Some(text) = text else { return Ok(None) };
    let value: i64 =
        text.parse().map_err(|_| HttpError::bad("maxWaitMs: expected a whole number of milliseconds"))?;
    Ok(u64::try_from(value).ok().filter(|ms| *ms > 0).map(Duration::from_millis))
}

/// Applies `request` to the root file system; idempotent: `already` says that it was so before.
async fn file_system(
    app: &App,
    path: &str,
    request: libc::c_ulong,
    already: libc::c_int,
) -> Result<Response, HttpError> {
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
        Err(e) if e.raw_os_error() != Some(already) => Err(HttpError::io("/", &e)),
        _ => Ok(no_content()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits() {
        let ms = |text| max_wait(Some(text)).unwrap();
        assert_eq!(ms("250"), Some(Duration::from_millis(250)));
        assert_eq!((ms("0"), ms("-1"), max_wait(None).unwrap()), (None, None, None));
        for bad in ["", "1.5", "soon", "9223372036854775808"] {
            assert_eq!(max_wait(Some(bad)).unwrap_err().status, StatusCode::BAD_REQUEST, "{bad}");
        }
    }
}
