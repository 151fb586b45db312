//! One inotify instance watching a directory, or a whole tree, and reporting paths relative to it.

use super::entry::entry_info;
use super::messages::{EventType, FilesystemEvent};
use crate::users::Names;
use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use tokio::io::unix::AsyncFd;

const MASK: u32 = libc::IN_CREATE
    | libc::IN_MODIFY
    | libc::IN_DELETE
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_ATTRIB
    | libc::IN_DELETE_SELF
    | libc::IN_MOVE_SELF
    | libc::IN_ONLYDIR;
const HEADER: usize = std::mem::size_of::<libc::inotify_event>();

pub struct Watch {
    fd: AsyncFd<OwnedFd>,
    root: String,
    recursive: bool,
    include_entry: bool,
    /// Watched directories, relative to the root (the root itself is "").
    dirs: HashMap<i32, String>,
}

impl Watch {
    pub fn new(root: String, recursive: bool, include_entry: bool) -> io::Result<Watch> {
        // SAFETY: the new descriptor is owned by nobody else.
        let fd = unsafe {
            match libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC) {
                fd if fd < 0 => return Err(io::Error::last_os_error()),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        // SAFETY: an `OwnedFd` stays open, and the same, until it is dropped.
        let fd = unsafe { AsyncFd::register(fd) }?;
        let dirs = HashMap::new();
        let mut watch = Watch { fd, root, recursive, include_entry, dirs };
        watch.add(String::new())?;
        if recursive {
            watch.add_below("", &mut Vec::new());
        }
        Ok(watch)
    }

    fn absolute(&self, relative: &str) -> String {
        format!("{}/{relative}", self.root.trim_end_matches('/'))
    }

    fn add(&mut self, relative: String) -> io::Result<()> {
        let path = CString::new(self.absolute(&relative))?;
        // SAFETY: `path` is a valid C string.
        let wd = unsafe { libc::inotify_add_watch(self.fd.as_raw_fd(), path.as_ptr(), MASK) };
        if wd < 0 {
            return Err(io::Error::last_os_error());
        }
        self.dirs.insert(wd, relative);
        Ok(())
    }

    /// Watches every directory below `relative`. What is found there may have been created before its directory was
    /// watched, so it is reported in `created`; at worst an entry is reported twice.
    fn add_below(&mut self, relative: &str, created: &mut Vec<String>) {
        let Ok(children) = fs::read_dir(self.absolute(relative)) else { return };
        for child in children.flatten() {
            let name = join(relative, &child.file_name().to_string_lossy());
            created.push(name.clone());
            if child.file_type().is_ok_and(|t| t.is_dir()) && self.add(name.clone()).is_ok() {
                self.add_below(&name, created);
            }
        }
    }

    /// Waits for the next batch of events; `None` once the watched directory is gone.
    pub async fn next(&mut self) -> io::Result<Option<Vec<FilesystemEvent>>> {
        let mut buf = [0u8; 16 << 10];
        let n = loop {
            let mut guard = self.fd.readable().await?;
            let read = guard.try_io(|fd| {
                // SAFETY: `buf` has the given room.
                let n = unsafe { libc::read(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) };
                usize::try_from(n).map_err(|_| io::Error::last_os_error())
            });
            match read {
                Ok(Ok(n)) => break n,
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(e)) => return Err(e),
                Err(_would_block) => {}
            }
        };
        let mut events = Vec::new();
        let mut at = 0;
        while at + HEADER <= n {
            let word = |i: usize| {
                let start = at + 4 * i;
                u32::from_ne_bytes([buf[start], buf[start + 1], buf[start + 2], buf[start + 3]])
            };
            let (wd, mask, size) = (word(0) as i32, word(1), word(3) as usize);
            let name = buf[at + HEADER..at + HEADER + size].split(|b| *b == 0).next();
            let name = OsStr::from_bytes(name.unwrap_or_default()).to_string_lossy();
            at += HEADER + size;
            if !self.on_event(wd, mask, &name, &mut events) {
                return Ok(if events.is_empty() { None } else { Some(events) });
            }
        }
        Ok(Some(events))
    }

    /// Whether the root directory is still there and watched.
    pub fn open(&self) -> bool {
        self.dirs.values().any(String::is_empty)
    }

    fn on_event(&mut self, wd: i32, mask: u32, name: &str, events: &mut Vec<FilesystemEvent>) -> bool {
        let Some(dir) = self.dirs.get(&wd).cloned() else { return true };
        if mask & (libc::IN_IGNORED | libc::IN_DELETE_SELF) != 0 {
            self.dirs.remove(&wd);
            return self.open();
        }
        if name.is_empty() {
            // About the directory itself; its parent reports it where that is watched.
            return true;
        }
        let path = join(&dir, name);
        let is_dir = mask & libc::IN_ISDIR != 0;
        let kind = if mask & (libc::IN_CREATE | libc::IN_MOVED_TO) != 0 {
            EventType::Create
        } else if mask & libc::IN_MODIFY != 0 {
            EventType::Write
        } else if mask & libc::IN_DELETE != 0 {
            EventType::Remove
        } else if mask & libc::IN_MOVED_FROM != 0 {
            EventType::Rename
        } else if mask & libc::IN_ATTRIB != 0 {
            EventType::Chmod
        } else {
            return true;
        };
        if kind == EventType::Rename && is_dir {
            self.forget(&path);
        }
        let entry = self.entry(&path, kind);
        events.push(FilesystemEvent { name: path.clone(), r#type: kind as i32, entry });
        if kind == EventType::Create && is_dir && self.recursive && self.add(path.clone()).is_ok() {
            let mut created = Vec::new();
            self.add_below(&path, &mut created);
            for name in created {
                let entry = self.entry(&name, EventType::Create);
                events.push(FilesystemEvent { name, r#type: EventType::Create as i32, entry });
            }
        }
        true
    }

    /// Stops watching a directory that was moved away, and all below it.
    fn forget(&mut self, path: &str) {
        let below = format!("{path}/");
        let fd = self.fd.as_raw_fd();
        self.dirs.retain(|wd, dir| {
            let gone = dir == path || dir.starts_with(&below);
            if gone {
                // SAFETY: plain system call.
                unsafe { libc::inotify_rm_watch(fd, *wd) };
            }
            !gone
        });
    }

    fn entry(&self, name: &str, kind: EventType) -> Option<super::messages::EntryInfo> {
        let present = self.include_entry && !matches!(kind, EventType::Remove | EventType::Rename);
        if !present {
            return None;
        }
        entry_info(&self.absolute(name), &Names::load()).ok()
    }
}

fn join(dir: &str, name: &str) -> String {
    if dir.is_empty() {
        name.to_owned()
    } else {
        format!("{dir}/{name}")
    }
}
