//! The few system calls that the standard library does not have.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

fn checked(result: i64) -> io::Result<i64> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Bytes of a file or block device.
pub fn length(file: &File) -> io::Result<u64> {
    // SAFETY: no memory is passed.
    checked(unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_END) }).map(|end| end as u64)
}

/// Make a part of a file read as zeros and give its space back; false where the filesystem cannot.
pub fn punch(file: &File, offset: u64, length: u64) -> bool {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no memory is passed.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, length as i64) == 0 }
}

/// Read what the page cache has; an error of kind WouldBlock when that is nothing.
pub fn read_cached(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: the vector names `buffer`, which outlives the call.
    let count = unsafe { libc::preadv2(file.as_raw_fd(), &part, 1, offset as i64, libc::RWF_NOWAIT) };
    checked(count as i64).map(|count| count as usize)
}

/// Whether two names are of one file.
pub fn same_file(a: &std::path::Path, b: &File) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let (a, b) = (std::fs::metadata(a)?, b.metadata()?);
    Ok((a.dev(), a.ino()) == (b.dev(), b.ino()))
}
