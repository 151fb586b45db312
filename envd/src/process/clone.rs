//! Creation of a process that borrows our memory until its exec, in a cgroup from its first moment.
//!
//! `clone3` with `CLONE_INTO_CGROUP` takes no lock that a fork would not take; a child that moved itself by writing
//! to `cgroup.procs` would wait for an RCU grace period. glibc has no wrapper for it that takes a stack.

use std::arch::asm;
use std::io;
use std::os::fd::RawFd;

/// Of linux/sched.h; the constant of `libc` is too narrow.
const CLONE_INTO_CGROUP: u64 = 1 << 33;

pub type Entry = extern "C" fn(*mut libc::c_void) -> libc::c_int;

/// Runs `entry(argument)` in a child on `stack`, whose result is its exit status, and waits for its exec or exit. The
/// child is in the cgroup whose directory is open as `group`, else in ours.
///
/// # Safety
/// The child shares this memory: `entry` may only make system calls, on what is prepared for it, and use less than
/// `stack`.
pub unsafe fn clone(
    entry: Entry,
    argument: *mut libc::c_void,
    stack: &mut [u128],
    group: Option<RawFd>,
) -> io::Result<i32> {
    let flags = libc::CLONE_VM | libc::CLONE_VFORK;
    if let Some(group) = group {
        match clone_into(flags as u64, entry, argument, stack, group) {
            // Someone removed the group: the command runs all the same.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => {}
            result => return result,
        }
    }
    let top = stack.as_mut_ptr_range().end.cast();
    match libc::clone(entry, top, flags | libc::SIGCHLD, argument) {
        pid if pid < 0 => Err(io::Error::last_os_error()),
        pid => Ok(pid),
    }
}

/// Guests are x86-64 machines: the registers are theirs.
unsafe fn clone_into(
    flags: u64,
    entry: Entry,
    argument: *mut libc::c_void,
    stack: &mut [u128],
    group: RawFd,
) -> io::Result<i32> {
    let mut arguments: libc::clone_args = std::mem::zeroed();
    arguments.flags = flags | CLONE_INTO_CGROUP;
    arguments.exit_signal = libc::SIGCHLD as u64;
    arguments.stack = stack.as_mut_ptr() as u64;
    arguments.stack_size = std::mem::size_of_val(stack) as u64;
    arguments.cgroup = group as u64;
    let result: i64;
    // The child sees 0 and an aligned, empty stack, and never comes back from here.
    asm!(
        "syscall",
        "test rax, rax",
        "jnz 2f",
        "xor ebp, ebp",
        "mov rdi, r13",
        "call r12",
        "mov edi, eax",
        "mov eax, {exit}",
        "syscall",
        "ud2",
        "2:",
        exit = const libc::SYS_exit,
        inlateout("rax") libc::SYS_clone3 => result,
        in("rdi") std::ptr::addr_of!(arguments),
        in("rsi") std::mem::size_of::<libc::clone_args>(),
        in("r12") entry,
        in("r13") argument,
        lateout("rcx") _,
        lateout("r11") _,
    );
    match i32::try_from(result) {
        Ok(pid) if pid >= 0 => Ok(pid),
        _ => Err(io::Error::from_raw_os_error(-result as i32)),
    }
}
