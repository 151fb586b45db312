//! Interface set-up with the classic ioctls: an address, a default route, and `/etc/resolv.conf`.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

/// A socket to speak ioctls through.
pub struct Network(UdpSocket);

fn named(name: &str) -> libc::ifreq {
    // SAFETY: all-zero is a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1).zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let inet = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from(address).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: both are 16 bytes of plain data, made to be cast to each other.
    unsafe { std::mem::transmute(inet) }
}

/// `a.b.c.d/prefix` as address and netmask.
fn parse_cidr(text: &str) -> Option<(Ipv4Addr, Ipv4Addr)> {
    let (address, prefix) = text.split_once('/')?;
    let prefix: u32 = prefix.parse().ok().filter(|p| *p <= 32)?;
    let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
    Some((address.parse().ok()?, mask.into()))
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

impl Network {
    pub fn open() -> io::Result<Network> {
        // Binding needs no interface; the socket is never used for traffic.
        UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map(Network)
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        let argument: *mut T = argument;
        // SAFETY: every caller passes the structure that the request takes.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, argument) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub fn up(&self, name: &str) -> io::Result<()> {
        let mut request = named(name);
        self.ioctl(libc::SIOCGIFFLAGS, &mut request)?;
        // SAFETY: the kernel has just filled this member of the union.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as libc::c_short;
        self.ioctl(libc::SIOCSIFFLAGS, &mut request)
    }

    /// Waits for the interface: its driver may still be probing.
    pub fn wait_for(&self, name: &str, limit: Duration) -> io::Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            match self.ioctl(libc::SIOCGIFFLAGS, &mut named(name)) {
                Ok(()) => return Ok(()),
                Err(e) if Instant::now() > deadline => {
                    return Err(io::Error::new(e.kind(), format!("{name} did not appear: {e}")));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    pub fn configure(
        &self,
        name: &str,
        cidr: &str,
        gateway: Option<&str>,
        mtu: Option<u32>,
    ) -> io::Result<()> {
        let (address, mask) = parse_cidr(cidr).ok_or_else(|| invalid(format!("aenv.ip: '{cidr}'")))?;
        let mut request = named(name);
        if let Some(mtu) = mtu {
            request.ifr_ifru.ifru_mtu = mtu as libc::c_int;
            self.ioctl(libc::SIOCSIFMTU, &mut request)?;
        }
        request.ifr_ifru.ifru_addr = socket_address(address);
        self.ioctl(libc::SIOCSIFADDR, &mut request)?;
        request.ifr_ifru.ifru_netmask = socket_address(mask);
        self.ioctl(libc::SIOCSIFNETMASK, &mut request)?;
        self.up(name)?;
        match gateway {
            None => Ok(()),
            Some(gateway) => self.default_route(gateway),
        }
    }

    fn default_route(&self, gateway: &str) -> io::Result<()> {
        let parsed = gateway.parse().map_err(|_| invalid(format!("aenv.gw: '{gateway}'")))?;
        // SAFETY: all-zero is a valid `rtentry`.
        let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
        route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
        route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
        route.rt_gateway = socket_address(parsed);
        route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
        match self.ioctl(libc::SIOCADDRT, &mut route) {
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            result => result,
        }
    }
}

/// Writes the name servers unless the image names some itself. A dangling link (to systemd-resolved, say) is replaced.
pub fn write_resolv_conf(servers: &[String]) -> io::Result<()> {
    const PATH: &str = "/etc/resolv.conf";
    match fs::read_to_string(PATH) {
        Ok(text) if !text.trim().is_empty() => return Ok(()),
        Ok(_) => {}
        Err(_) => {
            let _ = fs::remove_file(PATH);
            fs::create_dir_all("/etc")?;
        }
    }
    let lines: String = servers.iter().map(|s| format!("nameserver {s}\n")).collect();
    fs::write(PATH, lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cidr() {
        let (address, mask) = parse_cidr("169.254.0.21/30").unwrap();
        assert_eq!(address, Ipv4Addr::new(169, 254, 0, 21));
        assert_eq!(mask, Ipv4Addr::new(255, 255, 255, 252));
        assert_eq!(parse_cidr("10.0.0.1/0").unwrap().1, Ipv4Addr::UNSPECIFIED);
        assert!(parse_cidr("10.0.0.1/33").is_none());
        assert!(parse_cidr("10.0.0.1").is_none());
    }
}
