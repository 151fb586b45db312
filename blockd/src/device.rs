//! ublk devices: made, started, taken over, made larger, removed, through `/dev/ublk-control`.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::{cqueue, opcode, squeue, types, IoUring};

use crate::uapi::{self, ControlCommand, DeviceInfo, Parameters};

pub const DEPTH: u16 = 64; // requests at a time
pub const MAX_IO: u32 = 256 << 10; // bytes of one request
const SECTOR: u64 = 512;
/// How long the kernel may take to notice that a daemon is gone; up to 5 s on older ones.
const TAKE_OVER: Duration = Duration::from_secs(60);

pub struct Control {
    file: File,
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
}

impl Control {
    pub fn open() -> io::Result<Control> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", uapi::CONTROL));
        let file = OpenOptions::new().read(true).write(true).open(uapi::CONTROL).map_err(named)?;
        let ring = IoUring::builder().build(4)?;
        Ok(Control { file, ring })
    }

    fn attempt(&mut self, operation: u32, command: ControlCommand) -> io::Result<()> {
        let entry =
            opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), operation).cmd(command.bytes()).build();
        // SAFETY: what the command points to is the caller's until this returns, which is when it is done.
        unsafe { self.ring.submission().push(&entry).expect("an empty ring") };
        loop {
            match self.ring.submit_and_wait(1) {
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
                Ok(_) => {}
            }
            if let Some(done) = self.ring.completion().next() {
                let failed = done.result() < 0;
                return if failed { Err(io::Error::from_raw_os_error(-done.result())) } else { Ok(()) };
            }
        }
    }

    fn run(&mut self, operation: u32, command: ControlCommand, what: &str) -> io::Result<()> {
        self.attempt(operation, command).map_err(|error| refused(what, &error))
    }

    fn simple(&mut self, operation: u32, device: u32, data: u64, what: &str) -> io::Result<()> {
        let command = ControlCommand { device, queue: u16::MAX, data, ..Default::default() };
        self.run(operation, command, what)
    }

    pub fn features(&mut self) -> io::Result<u64> {
        let mut features = 0u64;
        let command = ControlCommand {
            device: u32::MAX,
            queue: u16::MAX,
            length: 8,
            address: std::ptr::addr_of_mut!(features) as u64,
            ..Default::default()
        };
        self.run(uapi::GET_FEATURES, command, "tell its features")?;
        Ok(features)
    }

    /// Make a device, which does not exist as a disk before `start`. `own` is kept by the kernel for `find`.
    pub fn add(&mut self, size: u64, own: u64) -> io::Result<DeviceInfo> {
        let mut info = DeviceInfo {
            queues: 1,
            depth: DEPTH,
            max_io: MAX_IO,
            device: u32::MAX, // any
            flags: uapi::F_USER_RECOVERY | uapi::F_USER_RECOVERY_REISSUE,
            own,
            ..Default::default()
        };
        let command = ControlCommand {
            device: u32::MAX,
            queue: u16::MAX,
            length: std::mem::size_of::<DeviceInfo>() as u16,
            address: std::ptr::addr_of_mut!(info) as u64,
            ..Default::default()
        };
        self.run(uapi::ADD_DEV, command, "make a ublk device")?;
        if let Err(error) = self.set_parameters(info.device, size) {
            let _ = self.delete(info.device);
            return Err(error);
        }
        Ok(info)
    }

    fn set_parameters(&mut self, device: u32, size: u64) -> io::Result<()> {
        let parameters = Parameters {
            length: std::mem::size_of::<Parameters>() as u32,
            types: uapi::PARAM_BASIC | uapi::PARAM_DISCARD,
            // No volatile cache: what is acknowledged is in the page cache of the file, which is all that is promised.
            logical_block_shift: 9,
            physical_block_shift: 12,
            io_optimal_shift: 16,
            io_minimum_shift: 12,
            max_sectors: MAX_IO / SECTOR as u32,
            sectors: size / SECTOR,
            discard_granularity: 4096,
            max_discard_sectors: 1 << 21, // 1 GiB
            max_zero_sectors: 1 << 21,
            max_discard_segments: 1,
            ..Default::default()
        };
        let command = ControlCommand {
            device,
            queue: u16::MAX,
            length: parameters.length as u16,
            address: std::ptr::addr_of!(parameters) as u64,
            ..Default::default()
        };
        self.run(uapi::SET_PARAMS, command, "set the device's parameters")
    }

    pub fn info(&mut self, device: u32) -> io::Result<DeviceInfo> {
        let mut info = DeviceInfo::default();
        let command = ControlCommand {
            device,
            queue: u16::MAX,
            length: std::mem::size_of::<DeviceInfo>() as u16,
            address: std::ptr::addr_of_mut!(info) as u64,
            ..Default::default()
        };
        self.run(uapi::GET_DEV_INFO, command, "describe the device")?;
        Ok(info)
    }

    /// The disk exists from here on. The queue has asked for requests already, and must answer them meanwhile: the
    /// kernel looks for partitions.
    pub fn start(&mut self, device: u32) -> io::Result<()> {
        self.simple(uapi::START_DEV, device, u64::from(std::process::id()), "start the device")
    }

    /// Begin to take over a device whose daemon has died, as soon as the kernel has noticed that.
    pub fn begin_recovery(&mut self, device: u32) -> io::Result<DeviceInfo> {
        let began = Instant::now();
        let command = ControlCommand { device, queue: u16::MAX, ..Default::default() };
        loop {
            match self.attempt(uapi::START_USER_RECOVERY, command) {
                Ok(()) => return self.info(device),
                Err(error) if error.raw_os_error() != Some(libc::EBUSY) || began.elapsed() >= TAKE_OVER => {
                    return Err(refused("hand over the device", &error))
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    pub fn end_recovery(&mut self, device: u32) -> io::Result<()> {
        self.simple(
            uapi::END_USER_RECOVERY,
            device,
            u64::from(std::process::id()),
            "continue with the device",
        )
    }

    pub fn resize(&mut self, device: u32, size: u64) -> io::Result<()> {
        self.simple(uapi::UPDATE_SIZE, device, size / SECTOR, "make the device larger")
    }

    /// The disk is gone from here on; its queue gets no more requests.
    pub fn stop(&mut self, device: u32) -> io::Result<()> {
        self.simple(uapi::STOP_DEV, device, 0, "stop the device")
    }

    /// Waits until nobody has the device's character device open.
    pub fn delete(&mut self, device: u32) -> io::Result<()> {
        self.simple(uapi::DEL_DEV, device, 0, "remove the device")
    }

    /// Devices that were made with this number.
    pub fn find(&mut self, own: u64) -> io::Result<Vec<u32>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/dev")? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let Some(number) = name.strip_prefix("ublkc").and_then(|n| n.parse().ok()) else { continue };
            if self.info(number).is_ok_and(|info| info.own == own) {
                found.push(number);
            }
        }
        Ok(found)
    }
}

fn refused(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("the kernel refused to {what}: {error}"))
}

pub fn open_character(device: u32) -> io::Result<File> {
    let path = format!("/dev/ublkc{device}");
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(|e| io::Error::new(e.kind(), format!("{path}: {e}")))
}

/// Bytes that the page cache of a device may hold unwritten: all of it has to be written before a file is frozen.
const MAX_DIRTY: &str = "134217728"; // 128 MiB, a tenth of a second of memory copies

/// Bound what the page cache of a device holds, where the kernel can. Settings of its queue are the server's: the kernel
/// empties the queue for them, which waits for this process.
pub fn bound(device: u32) {
    for (name, value) in [("strict_limit", "1"), ("max_bytes", MAX_DIRTY)] {
        let _ = std::fs::write(format!("/sys/block/ublkb{device}/bdi/{name}"), value);
    }
}

pub fn disk_path(device: u32) -> String {
    format!("/dev/ublkb{device}")
}
