//! Start of one command, with errors of every step reported to the caller.
//!
//! The child borrows our memory until its exec (`CLONE_VM | CLONE_VFORK`, as `posix_spawn` does): nothing is copied
//! and no page of ours faults afterwards, which is most of the cost of a fork under emulation. `std::process` is not
//! used: it waits for a child whose exec failed, which races with the reaper.

use super::clone::clone;
use crate::users::User;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// All a child needs, prepared beforehand: between clone and exec nothing may allocate.
pub struct Command {
    pub program: CString,
    pub argv: Vec<CString>,
    pub env: Vec<CString>,
    pub cwd: CString,
    /// The request named `cwd`; a default that the user may not enter is replaced by `/`.
    pub cwd_required: bool,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    /// Initial columns and rows: run on a terminal of its own.
    pub pty: Option<(u16, u16)>,
    /// Without a terminal: give a pipe as standard input instead of `/dev/null`.
    pub stdin: bool,
    /// As PID 1 envd is exempt from the OOM killer; its children must not be.
    pub reset_oom_score: bool,
    /// The directory of the cgroup to run in, where envd has one; must stay open.
    pub group: Option<RawFd>,
}

pub struct Spawned {
    pub pid: i32,
    pub stdio: Stdio,
}

pub enum Stdio {
    Pty(OwnedFd),
    Pipes { stdin: Option<OwnedFd>, stdout: OwnedFd, stderr: OwnedFd },
}

/// The step that failed.
const STEPS: [&str; 6] = [
    "starting a session",
    "setting up standard input and output",
    "changing the user",
    "changing to the working directory",
    "executing the program",
    "creating a process",
];

pub struct SpawnError {
    pub step: &'static str,
    pub error: io::Error,
}

/// Finds `name` in the PATH of the command's own environment, as `execvp` would.
pub fn find_program(name: &str, env: &BTreeMap<String, String>, cwd: &str) -> Option<String> {
    if name.is_empty() {
        return None;
    }
    if name.contains('/') {
        return Some(name.to_owned());
    }
    let path = env.get("PATH").map_or(crate::app::DEFAULT_PATH, String::as_str);
    path.split(':').find_map(|dir| {
        let dir = match dir {
            "" => cwd.to_owned(),
            d if d.starts_with('/') => d.to_owned(),
            d => format!("{cwd}/{d}"),
        };
        let candidate = format!("{dir}/{name}");
        let text = CString::new(candidate.as_str()).ok()?;
        // SAFETY: `text` is a valid C string.
        let executable = unsafe { libc::access(text.as_ptr(), libc::X_OK) } == 0;
        let file = executable && std::fs::metadata(&candidate).is_ok_and(|m| m.is_file());
        file.then_some(candidate)
    })
}

impl Command {
    pub fn set_user(&mut self, user: &User) {
        self.uid = user.uid;
        self.gid = user.gid;
        self.groups = user.groups();
    }
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: `fds` holds two integers; the descriptors are owned by nobody else.
    unsafe {
        if libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])))
    }
}

fn open(path: &std::ffi::CStr, flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: `path` is a valid C string; the new descriptor is owned by nobody else.
    unsafe {
        match libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) {
            fd if fd < 0 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// Opens a pseudo-terminal pair of the given size; the slave belongs to `uid`.
fn open_pty(cols: u16, rows: u16, uid: u32) -> io::Result<(OwnedFd, OwnedFd)> {
    // SAFETY: "/dev/ptmx\0" is a valid C string.
    let path = unsafe { std::ffi::CStr::from_bytes_with_nul_unchecked(b"/dev/ptmx\0") };
    let master = open(path, libc::O_RDWR | libc::O_NOCTTY)?;
    let unlock: libc::c_int = 0;
    // SAFETY: the ioctls read `unlock` and give a new descriptor (TIOCGPTPEER) that is owned by nobody else.
    let slave = unsafe {
        if libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &unlock) < 0 {
            return Err(io::Error::last_os_error());
        }
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        let fd = libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // Fails harmlessly when not root: then the owner is right already.
        libc::fchown(fd, uid, u32::MAX);
        OwnedFd::from_raw_fd(fd)
    };
    resize_pty(&master, cols, rows)?;
    Ok((master, slave))
}

pub fn resize_pty(master: &impl AsRawFd, cols: u16, rows: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: `size` outlives the call.
    match unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSWINSZ, &size) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    let all = strings.iter().map(|s| s.as_ptr());
    all.chain([std::ptr::null()]).collect()
}

/// What the child reads, and where it tells of a failure.
struct Shared<'a> {
    command: &'a Command,
    fds: [RawFd; 3],
    argv: &'a [*const libc::c_char],
    env: &'a [*const libc::c_char],
    /// The index of the step and its errno.
    failure: Option<(usize, i32)>,
}

/// Enough for the system calls of [`child`].
const STACK: usize = 64 << 10;

extern "C" fn entry(argument: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `spawn` passes a `Shared`, and sleeps in clone until this process has executed or exited.
    unsafe {
        let shared = &mut *argument.cast::<Shared>();
        shared.failure = Some(child(shared.command, &shared.fds, shared.argv, shared.env));
    }
    127
}

/// Starts the command; returns after its exec succeeded. `created` is called with the pid in any case.
pub fn spawn(command: &Command, created: impl FnOnce(i32)) -> Result<Spawned, SpawnError> {
    let setup = |error| SpawnError { step: STEPS[1], error };
    let (child_fds, stdio) = open_stdio(command).map_err(setup)?;
    let (argv, env) = (pointers(&command.argv), pointers(&command.env));
    let fds = [child_fds[0].as_raw_fd(), child_fds[1].as_raw_fd(), child_fds[2].as_raw_fd()];
    let mut shared = Shared { command, fds, argv: &argv, env: &env, failure: None };
    let mut stack: Vec<u128> = Vec::with_capacity(STACK / 16);
    // SAFETY: integers without a meaning; untouched pages cost nothing.
    unsafe { stack.set_len(STACK / 16) };
    // SAFETY: the child runs on a stack of its own and only makes system calls on memory prepared above; signals are
    // blocked, so that no handler of ours runs in it; this thread goes on when the memory is ours alone again.
    let cloned = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        let cloned = clone(entry, std::ptr::addr_of_mut!(shared).cast(), &mut stack, command.group);
        libc::pthread_sigmask(libc::SIG_SETMASK, &old, std::ptr::null_mut());
        cloned
    };
    let pid = cloned.map_err(|error| SpawnError { step: STEPS[5], error })?;
    created(pid);
    match shared.failure {
        None => Ok(Spawned { pid, stdio }),
        Some((step, errno)) => {
            let error = io::Error::from_raw_os_error(errno);
            Err(SpawnError { step: STEPS[step], error })
        }
    }
}

/// The child's three descriptors and our ends of them.
fn open_stdio(command: &Command) -> io::Result<([OwnedFd; 3], Stdio)> {
    if let Some((cols, rows)) = command.pty {
        let (master, slave) = open_pty(cols, rows, command.uid)?;
        let fds = [slave.try_clone()?, slave.try_clone()?, slave];
        return Ok((fds, Stdio::Pty(master)));
    }
    let (stdout, out) = pipe()?;
    let (stderr, err) = pipe()?;
    let (input, stdin) = if command.stdin {
        let (input, stdin) = pipe()?;
        (input, Some(stdin))
    } else {
        // SAFETY: "/dev/null\0" is a valid C string.
        let path = unsafe { std::ffi::CStr::from_bytes_with_nul_unchecked(b"/dev/null\0") };
        (open(path, libc::O_RDONLY)?, None)
    };
    Ok(([input, out, err], Stdio::Pipes { stdin, stdout, stderr }))
}

/// Runs in the child: returns only on failure, with the step's index and errno.
unsafe fn child(
    command: &Command,
    fds: &[RawFd],
    argv: &[*const libc::c_char],
    env: &[*const libc::c_char],
) -> (usize, i32) {
    let errno = || *libc::__errno_location();
    // An exec resets handlers but keeps ignored signals ignored and the mask as it is.
    // Ours must not run here once the mask is gone.
    for signal in [libc::SIGPIPE, libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGQUIT, libc::SIGCHLD] {
        libc::signal(signal, libc::SIG_DFL);
    }
    let mut mask: libc::sigset_t = std::mem::zeroed();
    libc::sigemptyset(&mut mask);
    libc::sigprocmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
    if libc::setsid() < 0 {
        return (0, errno());
    }
    if command.pty.is_some() && libc::ioctl(fds[0], libc::TIOCSCTTY, 0) < 0 {
        return (0, errno());
    }
    for (target, fd) in fds.iter().enumerate() {
        if libc::dup2(*fd, target as i32) < 0 {
            return (1, errno());
        }
    }
    if command.reset_oom_score {
        let path = b"/proc/self/oom_score_adj\0";
        let fd = libc::open(path.as_ptr().cast(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, b"0".as_ptr().cast(), 1);
            libc::close(fd);
        }
    }
    libc::umask(0o022);
    // Raw system calls: glibc's wrappers would signal threads that the child does not have.
    if libc::geteuid() == 0 {
        let groups = command.groups.as_ptr();
        if libc::syscall(libc::SYS_setgroups, command.groups.len(), groups) < 0
            || libc::syscall(libc::SYS_setgid, command.gid) < 0
            || libc::syscall(libc::SYS_setuid, command.uid) < 0
        {
            return (2, errno());
        }
    } else if libc::geteuid() != command.uid {
        return (2, libc::EPERM);
    }
    let root = b"/\0".as_ptr().cast();
    if libc::chdir(command.cwd.as_ptr()) < 0 && (command.cwd_required || libc::chdir(root) < 0) {
        return (3, errno());
    }
    libc::execve(command.program.as_ptr(), argv.as_ptr(), env.as_ptr());
    (4, errno())
}
