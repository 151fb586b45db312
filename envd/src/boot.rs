//! PID 1: from the initramfs to the guest's own root file system, and the way down.
//!
//! The initramfs holds this program as `/init`, `/modules/order` (module file names, one a line) and the modules. The
//! kernel command line says the rest (`aenv.*`).

use crate::freezer::Freezer;
use crate::network::{self, Network};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{symlink, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the root device may take to appear.
const ROOT_DEADLINE: Duration = Duration::from_secs(10);
const NEW_ROOT: &str = "/newroot";
const CGROUP: &str = "/sys/fs/cgroup";
/// Linux's `fs/ext4/ext4.h`: s_magic, EXT4_FEATURE_INCOMPAT_64BIT, `_IOW('f', 16, __u64)`.
const EXT4_MAGIC: u64 = 0xEF53;
const EXT4_64BIT: u64 = 0x80;
const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;

/// The `aenv.*` parameters of the kernel command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CommandLine {
    pub root: Option<String>,
    pub ip: Option<String>,
    pub gateway: Option<String>,
    pub dns: Vec<String>,
    pub hostname: Option<String>,
    pub mtu: Option<u32>,
    pub read_only: Vec<String>,
}

impl CommandLine {
    fn parse(text: &str) -> CommandLine {
        let mut parsed = CommandLine::default();
        for word in text.split_whitespace() {
            let Some((key, value)) = word.strip_prefix("aenv.").and_then(|w| w.split_once('=')) else {
                continue;
            };
            let value = value.to_owned();
            match key {
                "root" => parsed.root = Some(value),
                "ip" => parsed.ip = Some(value),
                "gw" => parsed.gateway = Some(value),
                "dns" => parsed.dns = value.split(',').map(str::to_owned).collect(),
                "hostname" => parsed.hostname = Some(value),
                "mtu" => parsed.mtu = value.parse().ok(),
                "readonly" => parsed.read_only = value.split(',').map(str::to_owned).collect(),
                _ => {}
            }
        }
        parsed
    }
}

/// Prints why the machine cannot run, and turns it off.
fn fail(message: &str) -> ! {
    eprintln!("envd: cannot boot: {message}");
    turn_off()
}

fn warn<T>(what: &str, result: io::Result<T>) {
    if let Err(e) = result {
        eprintln!("envd: {what}: {e}");
    }
}

fn c_string(text: &str) -> io::Result<CString> {
    Ok(CString::new(text)?)
}

fn mount(source: &str, target: &str, kind: &str, flags: libc::c_ulong, data: &str) -> io::Result<()> {
    let (source, target) = (c_string(source)?, c_string(target)?);
    let (kind, data) = (c_string(kind)?, c_string(data)?);
    // SAFETY: all are valid C strings.
    let result =
        unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast()) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes the directory and mounts on it.
fn mount_at(source: &str, target: &str, kind: &str, flags: libc::c_ulong, data: &str) -> io::Result<()> {
    fs::create_dir_all(target)?;
    mount(source, target, kind, flags, data)
}

/// Everything before the event loop starts. Does not return when the machine cannot run.
pub fn boot() {
    let secure = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // The kernel may have mounted /dev already (CONFIG_DEVTMPFS_MOUNT does not apply to an initramfs, though).
    let dev = mount_at("devtmpfs", "/dev", "devtmpfs", libc::MS_NOSUID, "mode=0755");
    open_console();
    warn("mounting /dev", dev);
    warn("mounting /proc", mount_at("proc", "/proc", "proc", secure, ""));
    warn("mounting /sys", mount_at("sysfs", "/sys", "sysfs", secure, ""));
    let command_line = CommandLine::parse(&fs::read_to_string("/proc/cmdline").unwrap_or_default());
    load_modules();
    match &command_line.root {
        Some(device) => enter_root(device),
        None => fail("aenv.root is not on the kernel command line"),
    }
    mount_rest(secure);
    for folder in &command_line.read_only {
        warn(&format!("making {folder} read-only"), make_read_only(folder));
    }
    warn("network", bring_up(&command_line));
    if let Some(name) = &command_line.hostname {
        warn("host name", crate::init::set_hostname(name));
    }
    warn("protecting envd from the OOM killer", fs::write("/proc/self/oom_score_adj", "-1000"));
    // SAFETY: plain system calls. Ctrl-alt-del is to send SIGINT, not to reset the machine.
    unsafe {
        libc::reboot(libc::RB_DISABLE_CAD);
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
        libc::signal(libc::SIGQUIT, libc::SIG_IGN);
        libc::umask(0o022);
    }
}

/// Without a console node in the initramfs the kernel starts us with no descriptors at all.
fn open_console() {
    let Ok(console) = File::options().read(true).write(true).open("/dev/console") else {
        return;
    };
    for target in 0..3 {
        // SAFETY: plain system call.
        unsafe { libc::dup2(console.as_raw_fd(), target) };
    }
    if console.as_raw_fd() < 3 {
        std::mem::forget(console);
    }
}

fn load_modules() {
    let order = fs::read_to_string("/modules/order").unwrap_or_default();
    for name in order.lines().map(str::trim).filter(|n| !n.is_empty()) {
        warn(&format!("module {name}"), load_module(&format!("/modules/{name}")));
    }
}

fn load_module(path: &str) -> io::Result<()> {
    const COMPRESSED: libc::c_int = 4;
    let file = File::open(path)?;
    let flags = if path.ends_with(".ko") { 0 } else { COMPRESSED };
    // SAFETY: the parameters are an empty C string.
    let result = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), b"\0".as_ptr(), flags) };
    match result {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            // Loaded or built in.
            e if e.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            e => Err(e),
        },
    }
}

/// Lets the root file system, which is mounted at `root`, grow to the size of its device, which may have grown since.
fn grow(device: &str, root: &str) -> io::Result<()> {
    let mut superblock = [0_u8; 1024];
    let mut file = File::open(device)?;
    file.seek(SeekFrom::Start(1024))?;
    file.read_exact(&mut superblock)?;
    let word =
        |at: usize| u64::from(u32::from_le_bytes(superblock[at..at + 4].try_into().expect("four bytes")));
    if word(56) & 0xFFFF != EXT4_MAGIC {
        return Err(io::Error::other("it is not ext4"));
    }
    let block = 1024_u64 << word(24).min(6);
    // The upper half is there in file systems with 64-bit block numbers.
    let blocks = word(4) | if word(96) & EXT4_64BIT != 0 { word(336) << 32 } else { 0 };
    let wanted = file.seek(SeekFrom::End(0))? / block;
    if wanted <= blocks {
        return Ok(());
    }
    let root = File::open(root)?;
    // SAFETY: the kernel reads the number behind the pointer.
    match unsafe { libc::ioctl(root.as_raw_fd(), EXT4_IOC_RESIZE_FS, &raw const wanted) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Mounts the root device and makes it `/`, freeing the memory of the initramfs.
fn enter_root(device: &str) {
    let deadline = Instant::now() + ROOT_DEADLINE;
    warn("making the mount point", fs::create_dir_all(NEW_ROOT));
    loop {
        // Looking first: the kernel complains on the console of every mount of a device that is not there.
        let mounted = match fs::metadata(device) {
            Ok(_) => mount(device, NEW_ROOT, "ext4", libc::MS_NOATIME, ""),
            Err(e) => Err(e),
        };
        match mounted {
            Ok(()) => break,
            // Not there yet, or its driver is not.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENXIO | libc::ENOTBLK)) => {
                if Instant::now() > deadline {
                    fail(&format!("root device {device} did not appear in {ROOT_DEADLINE:?}: {e}"));
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(e) => fail(&format!("mounting {device}: {e}")),
        }
    }
    warn("growing the root file system", grow(device, NEW_ROOT));
    for name in ["dev", "proc", "sys"] {
        let (old, new) = (format!("/{name}"), format!("{NEW_ROOT}/{name}"));
        let moved = fs::create_dir_all(&new).and_then(|()| mount(&old, &new, "", libc::MS_MOVE, ""));
        warn(&format!("moving {old}"), moved);
    }
    for path in ["/modules", "/init"] {
        let path = Path::new(path);
        let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
    let switched = std::env::set_current_dir(NEW_ROOT)
        .and_then(|()| mount(".", "/", "", libc::MS_MOVE, ""))
        .and_then(|()| std::os::unix::fs::chroot("."))
        .and_then(|()| std::env::set_current_dir("/"));
    if let Err(e) = switched {
        fail(&format!("switching to the root file system: {e}"));
    }
}

/// A folder that nobody can write to, as long as nobody with the right to do so mounts it anew.
fn make_read_only(folder: &str) -> io::Result<()> {
    mount(folder, folder, "", libc::MS_BIND, "")?;
    mount("", folder, "", libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY | libc::MS_NOATIME, "")
}

/// What an ordinary Linux system has mounted, and the links programs expect in /dev.
fn mount_rest(secure: libc::c_ulong) {
    let no_device = libc::MS_NOSUID | libc::MS_NODEV;
    let devpts = mount_at(
        "devpts",
        "/dev/pts",
        "devpts",
        libc::MS_NOSUID | libc::MS_NOEXEC,
        "gid=5,mode=620,ptmxmode=666",
    );
    warn("mounting /dev/pts", devpts);
    warn("mounting /dev/shm", mount_at("tmpfs", "/dev/shm", "tmpfs", no_device, "mode=1777"));
    warn("mounting /run", mount_at("tmpfs", "/run", "tmpfs", no_device, "mode=755"));
    // Not every kernel has it; only /freeze needs it.
    let _ = mount("cgroup2", CGROUP, "cgroup2", secure, "");
    let links = [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ];
    for (target, link) in links {
        let _ = symlink(target, link);
    }
    let _ = fs::create_dir_all("/run/lock");
    let tmp = fs::create_dir_all("/tmp").and_then(|()| {
        let mode = fs::metadata("/tmp")?.permissions().mode() & 0o7777;
        if mode == 0o1777 {
            return Ok(());
        }
        fs::set_permissions("/tmp", fs::Permissions::from_mode(0o1777))
    });
    warn("/tmp", tmp);
}

/// Groups for commands in the mounted cgroup2, whose root group envd stays in.
pub fn freezer() -> Freezer {
    Freezer::open(Path::new(CGROUP)).unwrap_or_else(|e| {
        eprintln!("envd: {CGROUP}: {e}; processes cannot be frozen");
        Freezer::default()
    })
}

fn bring_up(command_line: &CommandLine) -> io::Result<()> {
    let network = Network::open()?;
    network.up("lo")?;
    if let Some(address) = &command_line.ip {
        network.wait_for("eth0", Duration::from_secs(2))?;
        network.configure("eth0", address, command_line.gateway.as_deref(), command_line.mtu)?;
    }
    if !command_line.dns.is_empty() {
        network::write_resolv_conf(&command_line.dns)?;
    }
    Ok(())
}

/// Ends every process, writes everything to the disk, and turns the machine off.
pub fn power_off() -> ! {
    // SAFETY: plain system calls.
    unsafe { libc::kill(-1, libc::SIGTERM) };
    let deadline = Instant::now() + Duration::from_secs(2);
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    while unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) } >= 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: plain system call.
    unsafe { libc::kill(-1, libc::SIGKILL) };
    turn_off()
}

fn turn_off() -> ! {
    // SAFETY: plain system calls.
    unsafe {
        libc::sync();
        libc::mount(
            std::ptr::null(),
            b"/\0".as_ptr().cast(),
            std::ptr::null(),
            libc::MS_REMOUNT | libc::MS_RDONLY,
            std::ptr::null(),
        );
        libc::reboot(libc::RB_POWER_OFF);
    }
    // A machine that cannot be turned off: an exit of PID 1 would be a panic.
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line() {
        let parsed = CommandLine::parse(
            "console=ttyS0 aenv.root=/dev/vda aenv.ip=169.254.0.21/30 aenv.dns=1.1.1.1,8.8.8.8 aenv.mtu=1400 aenv.x \
             aenv.readonly=/mnt/a,/b",
        );
        assert_eq!(parsed.read_only, ["/mnt/a", "/b"]);
        assert_eq!(parsed.root.as_deref(), Some("/dev/vda"));
        assert_eq!(parsed.ip.as_deref(), Some("169.254.0.21/30"));
        assert_eq!(parsed.dns, ["1.1.1.1", "8.8.8.8"]);
        assert_eq!((parsed.mtu, parsed.gateway), (Some(1400), None));
    }
}
