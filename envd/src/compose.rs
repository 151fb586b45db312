//! `POST /files/compose`: concatenates files inside the guest, sharing blocks where the file system can.

use crate::app::App;
use crate::filesystem::entry::base_name;
use crate::filesystem::{make_dirs, own};
use crate::http::{blocking, json, read_body, HttpError, Request, Response};
use crate::users::User;
use serde_json::Value;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;

pub async fn post(app: Arc<App>, request: Request) -> Result<Response, HttpError> {
    let data = read_body(request.into_body(), 16 << 20).await?;
    let body: Value =
        serde_json::from_slice(&data).map_err(|e| HttpError::bad(format!("invalid JSON: {e}")))?;
    let sources: Option<Vec<String>> = body["source_paths"].as_array().and_then(|items| {
        let paths = items.iter().map(|v| v.as_str().map(str::to_owned));
        paths.collect()
    });
    let sources = sources.filter(|s| !s.is_empty());
    let Some((sources, destination)) = sources.zip(body["destination"].as_str().map(str::to_owned)) else {
        return Err(HttpError::bad("source_paths (a list) and destination are required"));
    };
    let username = body["username"].as_str().map(str::to_owned);
    let path = blocking(move || {
        let user = app.user(username.as_deref())?;
        compose(&app, &user, &sources, &destination)
    })
    .await??;
    let entry = serde_json::json!({"name": base_name(&path), "type": "file", "path": path});
    Ok(json(entry.to_string()))
}

/// Writes beside the destination and renames, so that it may itself be among the sources.
fn compose(app: &App, user: &User, sources: &[String], destination: &str) -> Result<String, HttpError> {
    let resolve = |p: &str| app.resolve(p, user).map_err(HttpError::bad);
    let target = resolve(destination)?;
    let sources = sources.iter().map(|s| resolve(s)).collect::<Result<Vec<_>, _>>()?;
    for source in &sources {
        let meta = fs::metadata(source).map_err(|e| HttpError::io(source, &e))?;
        if !meta.is_file() {
            return Err(HttpError::bad(format!("path '{source}' is not a regular file")));
        }
    }
    let failed = |e: io::Error| HttpError::io(&target, &e);
    if Path::new(&target).is_dir() {
        return Err(HttpError::bad(format!("path '{target}' is a directory")));
    }
    if let Some(parent) = Path::new(&target).parent() {
        make_dirs(parent, user).map_err(failed)?;
    }
    let temporary = format!("{target}.compose-{}", std::process::id());
    let result = (|| {
        let mut out = File::create(&temporary)?;
        for source in &sources {
            io::copy(&mut File::open(source)?, &mut out)?;
        }
        own(Path::new(&temporary), user)?;
        fs::rename(&temporary, &target)
    })();
    if let Err(e) = result {
        let _ = fs::remove_file(&temporary);
        return Err(failed(e));
    }
    for source in sources.iter().filter(|s| **s != target) {
        fs::remove_file(source).map_err(|e| HttpError::io(source, &e))?;
    }
    Ok(target)
}
