//! `filesystem.Filesystem`: look, make, move, remove, and watch.

pub mod entry;
pub mod inotify;
pub mod messages;
pub mod watchers;

use crate::app::App;
use crate::connect::{err, server_stream, unary, Code, RpcError};
use crate::http::{blocking, unknown_method, Request, Response};
use crate::proto::Empty;
use crate::users::{basic_auth_user, Names, User};
use entry::entry_info;
use hyper::header::HeaderMap;
use messages::*;
use std::fs;
use std::io;
use std::os::unix::fs::{chown, DirBuilderExt as _};
use std::path::Path;
use std::sync::Arc;

/// Dispatches one RPC by its method name.
pub async fn call(app: Arc<App>, method: &str, request: Request) -> Response {
    match method {
        "Stat" => unary(request, |h, r| with_user(app, h, move |app, user| stat(app, user, r))).await,
        "MakeDir" => unary(request, |h, r| with_user(app, h, move |app, user| make_dir(app, user, r))).await,
        "Move" => unary(request, |h, r| with_user(app, h, move |app, user| move_entry(app, user, r))).await,
        "ListDir" => unary(request, |h, r| with_user(app, h, move |app, user| list_dir(app, user, r))).await,
        "Remove" => unary(request, |h, r| with_user(app, h, move |app, user| remove(app, user, r))).await,
        "WatchDir" => server_stream(request, |h, r| watchers::watch_dir(app, h, r)).await,
        "CreateWatcher" => unary(request, |h, r| watchers::create(app, h, r)).await,
        "GetWatcherEvents" => {
            unary(request, |_, r: WatcherId| async move { app.watchers.events(&r.watcher_id) }).await
        }
        "RemoveWatcher" => {
            unary(request, |_, r: WatcherId| async move { app.watchers.remove(&r.watcher_id) }).await
        }
        _ => unknown_method(method),
    }
}

/// Runs `work` on a blocking thread with the user of the call.
pub async fn with_user<T: Send + 'static>(
    app: Arc<App>,
    headers: HeaderMap,
    work: impl FnOnce(&App, &User) -> Result<T, RpcError> + Send + 'static,
) -> Result<T, RpcError> {
    let name = basic_auth_user(&headers)?;
    blocking(move || work(&app, &app.user(name.as_deref())?)).await?
}

pub fn resolve(app: &App, user: &User, path: &str) -> Result<String, RpcError> {
    let resolved = app.resolve(path, user);
    resolved.map_err(|message| RpcError::new(Code::InvalidArgument, message))
}

fn info(path: &str) -> Result<EntryInfo, RpcError> {
    entry_info(path, &Names::load()).map_err(|e| RpcError::io(path, &e))
}

fn stat(app: &App, user: &User, request: PathRequest) -> Result<EntryResponse, RpcError> {
    let path = resolve(app, user, &request.path)?;
    Ok(EntryResponse { entry: Some(info(&path)?) })
}

/// Makes `path` and its missing ancestors, all owned by `user`.
pub fn make_dirs(path: &Path, user: &User) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_dir() => return Ok(()),
        Ok(_) => return Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        Err(_) => {}
    }
    if let Some(parent) = path.parent() {
        make_dirs(parent, user)?;
    }
    match fs::DirBuilder::new().mode(0o755).create(path) {
        Ok(()) => own(path, user),
        // Somebody else was faster.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(e) => Err(e),
    }
}

/// Gives `path` to `user`; without root privileges everything is ours anyway.
pub fn own(path: &Path, user: &User) -> io::Result<()> {
    // SAFETY: plain system call.
    if unsafe { libc::geteuid() } != 0 {
        return Ok(());
    }
    chown(path, Some(user.uid), Some(user.gid))
}

fn make_dir(app: &App, user: &User, request: PathRequest) -> Result<EntryResponse, RpcError> {
    let path = resolve(app, user, &request.path)?;
    match fs::metadata(&path) {
        Ok(meta) if meta.is_dir() => {
            return err(Code::AlreadyExists, format!("directory already exists: {path}"));
        }
        Ok(_) => {
            let message = format!("path already exists but it is not a directory: {path}");
            return err(Code::InvalidArgument, message);
        }
        Err(_) => {}
    }
    make_dirs(Path::new(&path), user).map_err(|e| RpcError::io(&path, &e))?;
    Ok(EntryResponse { entry: Some(info(&path)?) })
}

fn move_entry(app: &App, user: &User, request: MoveRequest) -> Result<EntryResponse, RpcError> {
    let source = resolve(app, user, &request.source)?;
    let destination = resolve(app, user, &request.destination)?;
    fs::symlink_metadata(&source).map_err(|e| RpcError::io(&source, &e))?;
    if let Some(parent) = Path::new(&destination).parent() {
        make_dirs(parent, user).map_err(|e| RpcError::io(&destination, &e))?;
    }
    match fs::rename(&source, &destination) {
        Ok(()) => {}
        Err(e) if e.raw_os_error() == Some(libc::EXDEV) => {
            move_across(&source, &destination).map_err(|e| RpcError::io(&destination, &e))?;
        }
        Err(e) => return Err(RpcError::io(&destination, &e)),
    }
    Ok(EntryResponse { entry: Some(info(&destination)?) })
}

/// Moves a regular file or a link between file systems; the copy is complete before the source goes.
fn move_across(source: &str, destination: &str) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt as _;
    let meta = fs::symlink_metadata(source)?;
    if meta.file_type().is_symlink() {
        std::os::unix::fs::symlink(fs::read_link(source)?, destination)?;
    } else if meta.is_file() {
        fs::copy(source, destination)?;
        let _ = chown(destination, Some(meta.uid()), Some(meta.gid()));
    } else {
        return Err(io::Error::from_raw_os_error(libc::EXDEV));
    }
    fs::remove_file(source)
}

fn list_dir(app: &App, user: &User, request: ListDirRequest) -> Result<ListDirResponse, RpcError> {
    let path = resolve(app, user, &request.path)?;
    let meta = fs::metadata(&path).map_err(|e| RpcError::io(&path, &e))?;
    if !meta.is_dir() {
        return err(Code::InvalidArgument, format!("path is not a directory: {path}"));
    }
    let mut entries = Vec::new();
    let names = Names::load();
    walk(&path, request.depth.max(1), &names, &mut entries).map_err(|e| RpcError::io(&path, &e))?;
    Ok(ListDirResponse { entries })
}

/// Adds the entries of `dir` in order of their names, each directory followed by its own entries.
fn walk(dir: &str, depth: u32, names: &Names, entries: &mut Vec<EntryInfo>) -> io::Result<()> {
    let mut children = fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
    children.sort_by_key(fs::DirEntry::file_name);
    for child in children {
        let name = child.file_name();
        let path = format!("{}/{}", dir.trim_end_matches('/'), name.to_string_lossy());
        // An entry may vanish while we look.
        let Ok(info) = entry_info(&path, names) else { continue };
        let descend = depth > 1 && !info.is_symlink && info.r#type() == FileType::Directory;
        entries.push(info);
        if descend {
            // A directory that cannot be read is listed all the same, without what is in it.
            let _ = walk(&path, depth - 1, names, entries);
        }
    }
    Ok(())
}

/// Removes a file or a whole tree; what does not exist is removed already.
fn remove(app: &App, user: &User, request: PathRequest) -> Result<Empty, RpcError> {
    let path = resolve(app, user, &request.path)?;
    if path == "/" {
        return err(Code::InvalidArgument, "the root directory cannot be removed");
    }
    let result = match fs::symlink_metadata(&path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(&path),
        Ok(_) => fs::remove_file(&path),
        Err(e) => Err(e),
    };
    match result {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(RpcError::io(&path, &e)),
        _ => Ok(Empty {}),
    }
}
