//! Stops and continues the guest's processes with the freezer of cgroup2 (Documentation/admin-guide/cgroup-v2.rst).
//!
//! Commands are started in the group `user`, those on a terminal in `pty`, and their descendants stay there. Both are
//! below a root group, where envd itself is. A freeze sweeps every group below the root: container engines make
//! groups of their own. Nothing here touches a disk, so it runs in the event loop, and a thaw never has to wait for
//! a worker thread.

use crate::http::HttpError;
use hyper::StatusCode;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _};
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use tokio::sync::{watch, Mutex, OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tokio::time::timeout;

/// How long a freeze waits for commands that are just being started.
const STARTS_LIMIT: Duration = Duration::from_secs(1);

/// The freezer, or none where envd has no cgroup of its own.
#[derive(Default)]
pub struct Freezer(Option<Groups>);

struct Groups {
    root: PathBuf,
    user: OwnedFd,
    pty: OwnedFd,
    /// Read by every start of a command until its program runs, written from a freeze to the thaw: a child that froze
    /// before its exec would keep the thread that waits for it.
    starts: Arc<RwLock<()>>,
    frozen: Mutex<Frozen>,
    /// Ends the wait of a freeze under way: who thaws need not sit it out.
    hurry: watch::Sender<()>,
}

/// What this daemon froze; part of its memory, so a snapshot has it.
#[derive(Default)]
struct Frozen {
    starts: Option<OwnedRwLockWriteGuard<()>>,
    /// Without those that the guest had frozen before: they stay as the guest wants them.
    names: BTreeSet<OsString>,
}

/// Lets a command start: no freeze begins while it is held.
#[derive(Default)]
pub struct Admission(#[allow(dead_code)] Option<OwnedRwLockReadGuard<()>>);

/// `FreezeResult` of the specification; counts of groups.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FreezeResult {
    pub requested: usize,
    pub frozen: usize,
    pub not_frozen: usize,
    pub failed: usize,
    pub sweep: Duration,
    pub wait: Duration,
}

impl FreezeResult {
    pub fn json(&self) -> String {
        serde_json::json!({
            "requested": self.requested,
            "frozen": self.frozen,
            "notFrozen": self.not_frozen,
            "failed": self.failed,
            // Of guests without a manager of cgroups; here the same daemon writes and reads.
            "unobservable": 0,
            "sweepMs": self.sweep.as_millis() as u64,
            "waitMs": self.wait.as_millis() as u64,
        })
        .to_string()
    }
}

impl Freezer {
    /// Makes the groups of commands below the cgroup2 directory `root`.
    pub fn open(root: &Path) -> io::Result<Freezer> {
        let group = |name: &str| -> io::Result<OwnedFd> {
            let path = root.join(name);
            match fs::create_dir(&path) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            // Only a cgroup2 directory has it, and neither a v1 hierarchy nor the root group does.
            fs::metadata(path.join("cgroup.freeze"))?;
            Ok(File::open(&path)?.into())
        };
        Ok(Freezer(Some(Groups {
            root: root.to_owned(),
            user: group("user")?,
            pty: group("pty")?,
            starts: Arc::default(),
            frozen: Mutex::default(),
            hurry: watch::Sender::new(()),
        })))
    }

    /// The group that a command is started in: a descriptor for clone3.
    pub fn group(&self, terminal: bool) -> Option<RawFd> {
        let groups = self.0.as_ref()?;
        Some(if terminal { groups.pty.as_raw_fd() } else { groups.user.as_raw_fd() })
    }

    /// Waits until nothing is frozen.
    pub async fn admit(&self) -> Admission {
        match &self.0 {
            Some(groups) => Admission(Some(groups.starts.clone().read_owned().await)),
            None => Admission::default(),
        }
    }

    /// Stops every process but envd. With a `budget`, waits that long at most until they have stopped.
    ///
    /// 501 without a cgroup, 503 while another freeze or thaw is under way, 500 when the groups cannot be listed.
    pub async fn freeze(&self, budget: Option<Duration>) -> Result<FreezeResult, HttpError> {
        let groups = self.groups()?;
        let mut hurry = groups.hurry.subscribe();
        let mut frozen = groups.frozen.try_lock().map_err(|_| busy("another freeze or thaw is under way"))?;
        if frozen.starts.is_none() {
            let starts = timeout(STARTS_LIMIT, groups.starts.clone().write_owned()).await;
            frozen.starts = Some(starts.map_err(|_| busy("a command is being started"))?);
        }
        let began = Instant::now();
        let mut result = FreezeResult::default();
        let written = groups.sweep(&mut frozen.names, &mut result).map_err(|e| groups.failed(&e));
        if written.is_err() && frozen.names.is_empty() {
            frozen.starts = None;
        }
        let written = written?;
        result.sweep = began.elapsed();
        let Some(budget) = budget else { return Ok(result) };
        let began = Instant::now();
        let all = async {
            for path in &written {
                // What cannot be watched is counted below.
                let _ = until_frozen(path).await;
            }
        };
        tokio::select! {
            _ = timeout(budget, all) => {}
            _ = hurry.changed() => {}
        }
        result.wait = began.elapsed();
        for path in &written {
            match fs::read_to_string(path.join("cgroup.events")) {
                Ok(events) if is_frozen(&events) => result.frozen += 1,
                Ok(_) => result.not_frozen += 1,
                Err(_) => result.failed += 1,
            }
        }
        Ok(result)
    }

    /// Lets everything that `freeze` stopped go on; idempotent. Errors as of `freeze`.
    pub async fn unfreeze(&self) -> Result<(), HttpError> {
        let groups = self.groups()?;
        let mut frozen = groups.frozen.try_lock().map_err(|_| busy("another freeze or thaw is under way"))?;
        groups.thaw(&mut frozen).map_err(|e| groups.failed(&e))
    }

    /// As `unfreeze`, also where nothing can be frozen, and while a freeze is under way, which is cut short.
    pub async fn thaw(&self) -> Result<(), HttpError> {
        let Some(groups) = &self.0 else { return Ok(()) };
        groups.hurry.send_replace(());
        let mut frozen = groups.frozen.lock().await;
        groups.thaw(&mut frozen).map_err(|e| groups.failed(&e))
    }

    fn groups(&self) -> Result<&Groups, HttpError> {
        let message = "this envd has no cgroup of its own (see --cgroup), so processes cannot be frozen";
        self.0.as_ref().ok_or_else(|| HttpError::new(StatusCode::NOT_IMPLEMENTED, message))
    }
}

fn busy(why: &str) -> HttpError {
    HttpError::new(StatusCode::SERVICE_UNAVAILABLE, format!("{why}: try again"))
}

impl Groups {
    fn failed(&self, e: &io::Error) -> HttpError {
        HttpError::io(&self.root.to_string_lossy(), e)
    }

    /// Asks every group to freeze; gives those that took it, and adds to `names` those that were not frozen before.
    fn sweep(&self, names: &mut BTreeSet<OsString>, result: &mut FreezeResult) -> io::Result<Vec<PathBuf>> {
        let mut written = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            let entry = entry?;
            if !entry.file_type()?.is_dir() {
                continue;
            }
            let control = entry.path().join("cgroup.freeze");
            let asked = fs::read_to_string(&control).is_ok_and(|state| state.trim() == "1");
            if fs::write(&control, "1").is_err() {
                // Removed meanwhile, or of a kind that cannot be frozen: not a reason to stop.
                result.failed += 1;
                continue;
            }
            if !asked {
                names.insert(entry.file_name());
            }
            written.push(entry.path());
        }
        result.requested = written.len();
        Ok(written)
    }

    /// Tries every group. What could not be thawed stays on the list.
    fn thaw(&self, frozen: &mut Frozen) -> io::Result<()> {
        let mut error = None;
        frozen.names.retain(|name| match fs::write(self.root.join(name).join("cgroup.freeze"), "0") {
            Err(e) if !gone(&e) => {
                error = Some(e);
                true
            }
            _ => false,
        });
        match error {
            Some(e) => Err(e),
            None => {
                frozen.starts = None;
                Ok(())
            }
        }
    }
}

/// Whether the group was removed: before its file was opened, or after.
fn gone(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
}

/// Resolves when all processes of the group have stopped. The kernel announces every change of the file.
async fn until_frozen(group: &Path) -> io::Result<()> {
    let file = File::open(group.join("cgroup.events"))?;
    // SAFETY: a `File` stays open, and the same, until it is dropped.
    let events = unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY)? };
    loop {
        let mut text = String::new();
        let mut file = events.get_ref();
        file.rewind()?;
        file.read_to_string(&mut text)?;
        if is_frozen(&text) {
            return Ok(());
        }
        events.ready(Interest::PRIORITY).await?.clear_ready();
    }
}

/// What `cgroup.events` says: `key value` lines, of which `frozen` tells that all processes have stopped.
fn is_frozen(events: &str) -> bool {
    events.lines().any(|line| line == "frozen 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events() {
        assert!(is_frozen("populated 1\nfrozen 1\n"));
        assert!(!is_frozen("populated 1\nfrozen 0\n"));
        assert!(!is_frozen(""));
    }

    #[test]
    fn a_body_has_every_field_of_the_specification() {
        let result = FreezeResult {
            requested: 3,
            frozen: 2,
            not_frozen: 1,
            failed: 4,
            sweep: Duration::from_micros(2900),
            wait: Duration::from_millis(50),
        };
        let wanted = serde_json::json!({
            "requested": 3, "frozen": 2, "notFrozen": 1, "failed": 4, "unobservable": 0, "sweepMs": 2, "waitMs": 50,
        });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&result.json()).unwrap(), wanted);
    }

    /// A folder that looks like a root group: what is swept and what is thawed are decisions about files.
    fn fake_root(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("envd-freezer-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for group in ["user", "pty"] {
            make_group(&root, group, "0\n");
        }
        root
    }

    fn make_group(root: &Path, name: &str, state: &str) {
        fs::create_dir_all(root.join(name)).unwrap();
        fs::write(root.join(name).join("cgroup.freeze"), state).unwrap();
        fs::write(root.join(name).join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
    }

    fn state(root: &Path, name: &str) -> String {
        fs::read_to_string(root.join(name).join("cgroup.freeze")).unwrap()
    }

    fn run<T>(work: impl std::future::Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    #[test]
    fn a_freeze_sweeps_all_groups_and_a_thaw_leaves_what_the_guest_froze() {
        let root = fake_root("sweep");
        make_group(&root, "docker", "1\n");
        fs::create_dir(root.join("threaded")).unwrap();
        fs::create_dir(root.join("threaded/cgroup.freeze")).unwrap();
        run(async {
            let freezer = Freezer::open(&root).unwrap();
            let result = freezer.freeze(Some(Duration::ZERO)).await.unwrap();
            assert_eq!((result.requested, result.failed), (3, 1));
            assert_eq!((result.frozen, result.not_frozen), (0, 3), "the files say that nothing has stopped");
            assert_eq!((state(&root, "user"), state(&root, "pty")), ("1".into(), "1".into()));
            fs::remove_dir_all(root.join("pty")).unwrap();
            freezer.unfreeze().await.unwrap();
            assert_eq!((state(&root, "user"), state(&root, "docker")), ("0".into(), "1".into()));
        });
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn commands_start_before_or_after_but_not_in_a_freeze() {
        let root = fake_root("starts");
        run(async {
            let freezer = Freezer::open(&root).unwrap();
            let admitted = freezer.admit().await;
            let error = freezer.freeze(None).await.unwrap_err();
            assert_eq!(error.status, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(state(&root, "user"), "0\n", "nothing was frozen");
            drop(admitted);
            freezer.freeze(None).await.unwrap();
            assert!(timeout(Duration::ZERO, freezer.admit()).await.is_err());
            freezer.freeze(None).await.unwrap();
            let (admitted, thawed) = tokio::join!(freezer.admit(), freezer.thaw());
            thawed.unwrap();
            drop(admitted);
            freezer.thaw().await.unwrap();
        });
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn one_operation_at_a_time() {
        let root = fake_root("busy");
        run(async {
            let freezer = Freezer::open(&root).unwrap();
            let held = freezer.0.as_ref().unwrap().frozen.lock().await;
            for status in
                [freezer.freeze(None).await.unwrap_err().status, freezer.unfreeze().await.unwrap_err().status]
            {
                assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
            }
            drop(held);
            freezer.unfreeze().await.unwrap();
        });
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn without_a_cgroup() {
        run(async {
            let freezer = Freezer::default();
            assert_eq!(freezer.freeze(None).await.unwrap_err().status, StatusCode::NOT_IMPLEMENTED);
            assert_eq!(freezer.unfreeze().await.unwrap_err().status, StatusCode::NOT_IMPLEMENTED);
            freezer.thaw().await.unwrap();
            assert_eq!(freezer.group(false), None);
            let _ = freezer.admit().await;
        });
        assert!(Freezer::open(Path::new("/proc/self")).is_err());
    }
}
