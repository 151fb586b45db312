//! envd: the guest daemon of AgentENV. Serves what E2B SDKs speak, and is PID 1 of the microVM.

mod app;
mod auth;
mod boot;
mod certificates;
mod clock_entropy;
mod codec;
mod compose;
mod connect;
mod control;
mod download;
mod filesystem;
mod freezer;
mod http;
mod init;
mod metrics;
mod multipart;
mod network;
mod process;
mod proto;
mod range;
mod reaper;
mod request_body;
mod server;
mod tunnel;
mod upload;
mod users;

use app::Options;
use freezer::Freezer;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// The E2B version whose behaviour is provided; SDKs choose their requests by it.
const VERSION: &str = env!("CARGO_PKG_VERSION");
const PORT: u16 = 49983;

const USAGE: &str =
    "usage: envd [--listen ADDRESS] [--port PORT] [--cgroup DIRECTORY] [--no-clock] [--version]";

struct Arguments {
    listen: IpAddr,
    port: u16,
    /// A cgroup2 directory to make the commands' groups in; envd must not be in a group below it.
    cgroup: Option<PathBuf>,
    no_clock: bool,
}

fn parse_arguments(arguments: impl Iterator<Item = String>) -> Result<Option<Arguments>, String> {
    let mut parsed =
        Arguments { listen: Ipv4Addr::UNSPECIFIED.into(), port: PORT, cgroup: None, no_clock: false };
    let mut arguments = arguments.peekable();
    while let Some(argument) = arguments.next() {
        let (name, inline) = match argument.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (argument, None),
        };
        let mut value = || inline.clone().or_else(|| arguments.next());
        match name.as_str() {
            "--version" => return Ok(None),
            "--no-clock" => parsed.no_clock = true,
            "--port" => {
                let port = value().and_then(|v| v.parse().ok());
                parsed.port = port.ok_or("--port: expected a port number")?;
            }
            "--cgroup" => parsed.cgroup = Some(value().ok_or("--cgroup: expected a directory")?.into()),
            "--listen" => {
                let address = value().and_then(|v| v.parse().ok());
                parsed.listen = address.ok_or("--listen: expected an IP address")?;
            }
            _ => return Err(format!("unknown argument {name}\n{USAGE}")),
        }
    }
    Ok(Some(parsed))
}

fn main() -> ExitCode {
    let started = Instant::now();
    if std::process::id() == 1 {
        boot::boot();
        let options = Options { pid1: true, root: true, set_clock: true };
        let address = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), PORT);
        let result = server::run(options, address, boot::freezer(), started);
        eprintln!("envd: fatal: {result:?}");
        boot::power_off();
    }
    let arguments = match parse_arguments(std::env::args().skip(1)) {
        Ok(Some(arguments)) => arguments,
        Ok(None) => {
            println!("{VERSION}");
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            eprintln!("envd: {message}");
            return ExitCode::from(2);
        }
    };
    // SAFETY: plain system call.
    let root = unsafe { libc::geteuid() } == 0;
    let options = Options { pid1: false, root, set_clock: root && !arguments.no_clock };
    let address = SocketAddr::new(arguments.listen, arguments.port);
    let freezer = match &arguments.cgroup {
        None => Freezer::default(),
        Some(directory) => match Freezer::open(directory) {
            Ok(freezer) => freezer,
            Err(e) => {
                eprintln!("envd: --cgroup {}: {e}", directory.display());
                return ExitCode::FAILURE;
            }
        },
    };
    match server::run(options, address, freezer, started) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("envd: {address}: {e}");
            ExitCode::FAILURE
        }
    }
}
