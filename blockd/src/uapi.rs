//! What is said to the kernel's ublk driver (`include/uapi/linux/ublk_cmd.h`, Linux 6.5 and newer).

pub const CONTROL: &str = "/dev/ublk-control";

const fn command(direction: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number
}

const READ: u32 = 2;
const READ_WRITE: u32 = 3;
const CONTROL_SIZE: usize = std::mem::size_of::<ControlCommand>();
const IO_SIZE: usize = std::mem::size_of::<IoCommand>();

pub const GET_DEV_INFO: u32 = command(READ, 0x02, CONTROL_SIZE);
pub const ADD_DEV: u32 = command(READ_WRITE, 0x04, CONTROL_SIZE);
pub const DEL_DEV: u32 = command(READ_WRITE, 0x05, CONTROL_SIZE);
pub const START_DEV: u32 = command(READ_WRITE, 0x06, CONTROL_SIZE);
pub const STOP_DEV: u32 = command(READ_WRITE, 0x07, CONTROL_SIZE);
pub const SET_PARAMS: u32 = command(READ_WRITE, 0x08, CONTROL_SIZE);
pub const START_USER_RECOVERY: u32 = command(READ_WRITE, 0x10, CONTROL_SIZE);
pub const END_USER_RECOVERY: u32 = command(READ_WRITE, 0x11, CONTROL_SIZE);
pub const GET_FEATURES: u32 = command(READ, 0x13, CONTROL_SIZE);
pub const UPDATE_SIZE: u32 = command(READ_WRITE, 0x15, CONTROL_SIZE);

pub const FETCH: u32 = command(READ_WRITE, 0x20, IO_SIZE);
pub const COMMIT_AND_FETCH: u32 = command(READ_WRITE, 0x21, IO_SIZE);

/// The device outlives its daemon, and requests that had no answer are given to the next one.
pub const F_USER_RECOVERY: u64 = 1 << 3;
pub const F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// A live device can be made larger: Linux 6.16.
pub const F_UPDATE_SIZE: u64 = 1 << 10;

pub const OP_READ: u32 = 0;
pub const OP_WRITE: u32 = 1;
pub const OP_FLUSH: u32 = 2;
pub const OP_DISCARD: u32 = 3;
pub const OP_WRITE_ZEROES: u32 = 5;

pub const PARAM_BASIC: u32 = 1;
pub const PARAM_DISCARD: u32 = 2;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ControlCommand {
    pub device: u32,
    pub queue: u16,
    pub length: u16,
    pub address: u64,
    pub data: u64,
    pub path_length: u16,
    pub padding: u16,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct DeviceInfo {
    pub queues: u16,
    pub depth: u16,
    pub state: u16,
    pub padding: u16,
    pub max_io: u32,
    pub device: u32,
    pub pid: i32,
    pub padding1: u32,
    pub flags: u64,
    /// Ours: the driver keeps it and does not look at it.
    pub own: u64,
    pub uid: u32,
    pub gid: u32,
    pub reserved: [u64; 2],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Parameters {
    pub length: u32,
    pub types: u32,
    // basic
    pub attributes: u32,
    pub logical_block_shift: u8,
    pub physical_block_shift: u8,
    pub io_optimal_shift: u8,
    pub io_minimum_shift: u8,
    pub max_sectors: u32,
    pub chunk_sectors: u32,
    pub sectors: u64,
    pub virtual_boundary: u64,
    // discard
    pub discard_alignment: u32,
    pub discard_granularity: u32,
    pub max_discard_sectors: u32,
    pub max_zero_sectors: u32,
    pub max_discard_segments: u16,
    pub reserved: u16,
    pub padding: u32,
}

/// A request, as the driver describes it in the mapped memory of a queue.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Descriptor {
    pub operation: u32, // bits 0-7; flags above
    pub sectors: u32,
    pub start: u64, // sector
    pub address: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct IoCommand {
    pub queue: u16,
    pub tag: u16,
    pub result: i32,
    pub address: u64,
}

impl IoCommand {
    pub fn bytes(self) -> [u8; IO_SIZE] {
        let mut out = [0; IO_SIZE];
        out[..2].copy_from_slice(&self.queue.to_ne_bytes());
        out[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        out[4..8].copy_from_slice(&self.result.to_ne_bytes());
        out[8..].copy_from_slice(&self.address.to_ne_bytes());
        out
    }
}

impl ControlCommand {
    /// In the 80 bytes of a large io_uring entry.
    pub fn bytes(self) -> [u8; 80] {
        let mut out = [0; 80];
        out[..4].copy_from_slice(&self.device.to_ne_bytes());
        out[4..6].copy_from_slice(&self.queue.to_ne_bytes());
        out[6..8].copy_from_slice(&self.length.to_ne_bytes());
        out[8..16].copy_from_slice(&self.address.to_ne_bytes());
        out[16..24].copy_from_slice(&self.data.to_ne_bytes());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_size_that_the_kernel_expects() {
        assert_eq!(CONTROL_SIZE, 32);
        assert_eq!(IO_SIZE, 16);
        assert_eq!(std::mem::size_of::<DeviceInfo>(), 64);
        assert_eq!(std::mem::size_of::<Descriptor>(), 24);
        assert_eq!(std::mem::size_of::<Parameters>(), 64);
        assert_eq!(ADD_DEV, 0xc020_7504);
        assert_eq!(FETCH, 0xc010_7520);
        assert_eq!(GET_FEATURES, 0x8020_7513);
    }
}
