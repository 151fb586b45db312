//! aenv-blockd: serves a chain of qcow2 files as a ublk block device.
//!
//!     aenv-blockd serve --disk FILE --state FILE --socket-fd N
//!     aenv-blockd recover --state FILE --socket-fd N
//!     aenv-blockd sweep --state FILE
//!     aenv-blockd probe
//!
//! One process per disk. It outlives whoever started it; if it dies the kernel keeps the device and the requests, until
//! `recover` takes them over or `sweep` removes them. See docs/internals/disk-exports.md.

mod active;
mod device;
mod engine;
mod header;
mod layer;
#[cfg(test)]
mod model_test;
mod queue;
mod server;
mod system;
mod uapi;

use std::collections::HashMap;
use std::io;
use std::os::fd::FromRawFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use server::State;

const USAGE: &str =
    "usage: aenv-blockd serve|recover|sweep|probe [--disk FILE] [--state FILE] [--socket-fd N]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("aenv-blockd: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> io::Result<()> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidInput, USAGE);
    let (action, rest) = arguments.split_first().ok_or_else(wrong)?;
    let mut options = HashMap::new();
    for pair in rest.chunks(2) {
        let [name, value] = pair else { return Err(wrong()) };
        options.insert(name.as_str(), value.as_str());
    }
    let path =
        |name: &str| options.get(name).map(Path::new).filter(|path| path.is_absolute()).ok_or_else(wrong);
    match action.as_str() {
        "serve" => {
            let disk = path("--disk")?.to_path_buf();
            let state = State { path: PathBuf::from(path("--state")?), disk, devices: Vec::new() };
            server::serve(state, listener(&options)?, false)
        }
        "recover" => server::serve(State::read(path("--state")?)?, listener(&options)?, true),
        "sweep" => server::sweep(path("--state")?).map(|count| println!("{count}")),
        "probe" => server::probe().map(|features| println!("{features:#x}")),
        _ => Err(wrong()),
    }
}

/// The control socket, which listens already: nobody has to wait for it.
fn listener(options: &HashMap<&str, &str>) -> io::Result<UnixListener> {
    let fd = options.get("--socket-fd").and_then(|text| text.parse().ok()).filter(|fd| *fd > 2);
    let fd = fd.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, USAGE))?;
    // SAFETY: the descriptor was given to this process for this, and nothing else uses it.
    let listener = unsafe { UnixListener::from_raw_fd(fd) };
    listener.set_nonblocking(false)?;
    Ok(listener)
}
