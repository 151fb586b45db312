//! Wall clock and kernel entropy, both stale in a restored VM.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

/// `RNDADDENTROPY` and `RNDRESEEDCRNG` of linux/random.h.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
const MAX_ENTROPY: usize = 512;

/// Sets the wall clock to nanoseconds since 1970.
pub fn set_clock(nanoseconds: i64) -> io::Result<()> {
    let time = libc::timespec {
        tv_sec: nanoseconds.div_euclid(1_000_000_000),
        tv_nsec: nanoseconds.rem_euclid(1_000_000_000),
    };
    // SAFETY: `time` outlives the call.
    match unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &time) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[repr(C)]
struct PoolInfo {
    entropy_count: libc::c_int,
    buf_size: libc::c_int,
    buf: [u8; MAX_ENTROPY],
}

/// Credits `bytes` to the kernel's pool and reseeds the generator at once: otherwise siblings restored from one
/// snapshot would draw the same "random" numbers until the next scheduled reseed.
pub fn add_entropy(bytes: &[u8]) -> io::Result<()> {
    let device = File::options().read(true).write(true).open("/dev/urandom")?;
    for chunk in bytes.chunks(MAX_ENTROPY) {
        let mut info = PoolInfo {
            entropy_count: chunk.len() as libc::c_int * 8,
            buf_size: chunk.len() as libc::c_int,
            buf: [0; MAX_ENTROPY],
        };
        info.buf[..chunk.len()].copy_from_slice(chunk);
        // SAFETY: `info` has the layout of `struct rand_pool_info`.
        if unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY as _, &info) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: the ioctl has no argument.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG as _, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Nanoseconds since 1970 of an RFC 3339 time such as `2026-01-31T12:00:00.123456789+01:00`.
pub fn parse_rfc3339(text: &str) -> Option<i64> {
    let number = |from: usize, to: usize| text.get(from..to)?.parse::<i64>().ok().filter(|n| *n >= 0);
    let separators = [(4, b'-'), (7, b'-'), (13, b':'), (16, b':')];
    let bytes = text.as_bytes();
    if bytes.len() < 20 || separators.iter().any(|(at, c)| bytes[*at] != *c) {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    let valid =
        (1..=12).contains(&month) && (1..=31).contains(&day) && hour < 24 && minute < 60 && second <= 60;
    if !valid {
        return None;
    }
    let mut rest = text.get(19..)?;
    let mut nanoseconds = 0;
    if let Some(fraction) = rest.strip_prefix('.') {
        let digits = fraction.bytes().take_while(u8::is_ascii_digit).count();
        let padded = format!("{:0<9}", &fraction[..digits]);
        nanoseconds = padded.get(..9)?.parse::<i64>().ok().filter(|_| digits > 0)?;
        rest = &fraction[digits..];
    }
    let offset = match rest.as_bytes() {
        [b'Z' | b'z'] => 0,
        [sign @ (b'+' | b'-'), _, _, b':', _, _] => {
            let (hours, minutes) =
                (rest.get(1..3)?.parse::<i64>().ok()?, rest.get(4..6)?.parse::<i64>().ok()?);
            (hours * 3600 + minutes * 60) * if *sign == b'-' { -1 } else { 1 }
        }
        _ => return None,
    };
    let seconds = days(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset;
    seconds.checked_mul(1_000_000_000)?.checked_add(nanoseconds)
}

/// Days since 1970 of a Gregorian date (Howard Hinnant's `days_from_civil`).
fn days(year: i64, month: i64, day: i64) -> i64 {
    let y = if month <= 2 { year - 1 } else { year };
    let era = y.div_euclid(400);
    let yoe = y.rem_euclid(400);
    let doy = (153 * (if month > 2 { month - 3 } else { month + 9 }) + 2) / 5 + day - 1;
    let doe = yoe * 365 + yoe / 4 - yoe / 100 + doy;
    era * 146_097 + doe - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let seconds = |t| parse_rfc3339(t).map(|n| n / 1_000_000_000);
        assert_eq!(seconds("1970-01-01T00:00:00Z"), Some(0));
        assert_eq!(seconds("2000-02-29T00:00:00Z"), Some(951_782_400));
        assert_eq!(seconds("2023-11-14T23:13:20+01:00"), Some(1_700_000_000));
        assert_eq!(parse_rfc3339("1970-01-01T00:00:00.5Z"), Some(500_000_000));
        assert_eq!(parse_rfc3339("1970-01-01T00:00:00.1234567891Z"), Some(123_456_789));
        for bad in ["", "2023-11-14", "2023-13-14T00:00:00Z", "2023-11-14T00:00:00", "2023-11-14T00:00:00.Z"]
        {
            assert_eq!(parse_rfc3339(bad), None, "{bad}");
        }
    }
}
