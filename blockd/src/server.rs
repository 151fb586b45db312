//! The control socket: a line of JSON is a command, a line of JSON is its answer.
//!
//! `{"do": "status"}`, `{"do": "rebase", "overlay": PATH}`, `{"do": "replace-backing", "backing": PATH}`,
//! `{"do": "grow", "size": BYTES}`, `{"do": "close"}`. An answer has `error`, or `ok` and more.
//!
//! This process never reads, writes or syncs its own device: killed while it did, it could not end before another daemon
//! took over, and another could not take over before it ended. Whoever wants a device synced does that himself.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use serde_json::{json, Value};

use crate::device::{self, Control};
use crate::engine::Engine;
use crate::queue::{self, Message, Queue};
use crate::uapi;

/// What a daemon that takes over needs: the file that is written to, and the devices, newest last. Written by rename.
#[derive(Clone)]
pub struct State {
    pub path: PathBuf,
    pub disk: PathBuf,
    pub devices: Vec<u32>,
}

impl State {
    fn write(&self) -> io::Result<()> {
        let new = self.path.with_extension("new");
        let text = json!({"disk": self.disk, "devices": self.devices}).to_string();
        std::fs::write(&new, text)?;
        std::fs::rename(&new, &self.path)
    }

    pub fn read(path: &Path) -> io::Result<State> {
        let bad =
            |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", path.display()));
        let text = std::fs::read(path).map_err(|error| bad(&error.to_string()))?;
        let value: Value = serde_json::from_slice(&text).map_err(|_| bad("not JSON"))?;
        let disk = value["disk"].as_str().ok_or_else(|| bad("no disk"))?.into();
        let devices = value["devices"].as_array().ok_or_else(|| bad("no devices"))?;
        let devices = devices.iter().map(|n| n.as_u64().map(|n| n as u32)).collect::<Option<_>>();
        Ok(State { path: path.to_path_buf(), disk, devices: devices.ok_or_else(|| bad("no devices"))? })
    }

    /// By which devices of this disk are found in the kernel when the file is lost.
    pub fn own(path: &Path) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325u64; // FNV-1a
        for byte in path.as_os_str().as_encoded_bytes() {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
        hash | 1 // never the 0 of devices that are not ours
    }
}

struct Daemon {
    queue: Queue,
    thread: Option<JoinHandle<()>>,
    control: Control,
    state: Arc<Mutex<State>>,
}

/// Serve the disk of `state` until a client says close. With `recover`, take over the devices that it names.
pub fn serve(state: State, listener: UnixListener, recover: bool) -> io::Result<()> {
    let mut control = Control::open()?;
    let state = Arc::new(Mutex::new(state));
    let (disk, noted) = (state.lock().expect("state").disk.clone(), state.clone());
    let (queue, size, thread) = queue::start(move || {
        // Known to be the disk before anything is written to it: see `Engine::rebase`.
        let note = move |path: &Path| {
            let mut state = noted.lock().expect("state");
            let old = std::mem::replace(&mut state.disk, path.to_path_buf());
            state.write().map_err(|error| {
                state.disk = old;
                error
            })
        };
        Engine::open(&disk, Box::new(note))
    })?;
    if recover {
        for number in state.lock().expect("state").devices.clone() {
            let info = control.begin_recovery(number)?;
            attach(&queue, number, info.depth, info.max_io)?;
            control.end_recovery(number)?;
        }
    }
    let mut daemon = Daemon { queue, thread: Some(thread), control, state };
    if !recover {
        daemon.add(size)?;
    }
    let daemon = Arc::new(Mutex::new(daemon));
    for stream in listener.incoming() {
        let (stream, daemon) = (stream?, daemon.clone());
        std::thread::spawn(move || drop(converse(&stream, &daemon)));
    }
    Ok(())
}

fn attach(queue: &Queue, device: u32, depth: u16, max_io: u32) -> io::Result<()> {
    let file = device::open_character(device)?;
    queue.ask(|answer| Message::Attach { device, file, depth, max_io, answer }).map_err(io::Error::other)
}

fn converse(stream: &UnixStream, daemon: &Mutex<Daemon>) -> io::Result<()> {
    for line in BufReader::new(stream).lines() {
        let command: Value = serde_json::from_str(&line?).unwrap_or(Value::Null);
        let mut daemon = daemon.lock().expect("daemon");
        let outcome = daemon.obey(&command);
        let answer = outcome.unwrap_or_else(|error| json!({"error": error}));
        (&mut &*stream).write_all(format!("{answer}\n").as_bytes())?;
        if command["do"] == "close" && answer["ok"] == true {
            std::process::exit(0);
        }
    }
    Ok(())
}

impl Daemon {
    /// Make a device of this size and start it; the last one is the one to use.
    fn add(&mut self, size: u64) -> io::Result<()> {
        let own = State::own(&self.state.lock().expect("state").path);
        let info = self.control.add(size, own)?;
        {
            let mut state = self.state.lock().expect("state");
            state.devices.push(info.device);
            state.write()?;
        }
        attach(&self.queue, info.device, info.depth, info.max_io)?;
        self.control.start(info.device)?;
        device::bound(info.device);
        Ok(())
    }

    fn devices(&self) -> Vec<u32> {
        self.state.lock().expect("state").devices.clone()
    }

    fn obey(&mut self, command: &Value) -> Result<Value, String> {
        let path = |name: &str| command[name].as_str().map(PathBuf::from).ok_or(format!("{name} is missing"));
        match command["do"].as_str().unwrap_or("") {
            "status" => {
                let mut status = self.queue.ask(|answer| Message::Status { answer })?;
                let devices = self.devices();
                status["devices"] = json!(devices);
                status["path"] = json!(devices.last().map(|last| device::disk_path(*last)));
                status["ok"] = json!(true);
                return Ok(status);
            }
            "rebase" => {
                let overlay = path("overlay")?;
                self.queue.ask(|answer| Message::Rebase { overlay, answer })?;
            }
            "replace-backing" => {
                let backing = path("backing")?;
                self.queue.ask(|answer| Message::ReplaceBacking { backing, answer })?;
            }
            "grow" => {
                let size = command["size"].as_u64().ok_or("size is missing")?;
                self.queue.ask(|answer| Message::Grow { size, answer })?;
                self.widen(size).map_err(|error| error.to_string())?;
            }
            "close" => self.close().map_err(|error| error.to_string())?,
            other => return Err(format!("there is no command {other:?}")),
        }
        Ok(json!({"ok": true}))
    }

    /// Let the kernel know the new size: the same device where it can be changed, else another one of the same disk.
    fn widen(&mut self, size: u64) -> io::Result<()> {
        let devices = self.devices();
        if self.control.features()? & uapi::F_UPDATE_SIZE != 0 {
            if let Some(last) = devices.last() {
                return self.control.resize(*last, size);
            }
        }
        self.add(size)
    }

    fn close(&mut self) -> io::Result<()> {
        let devices = self.devices();
        for number in &devices {
            self.control.stop(*number)?;
        }
        // The thread ends with its last device, and closes the character devices that deletion waits for.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for number in &devices {
            self.control.delete(*number)?;
        }
        let _ = std::fs::remove_file(&self.state.lock().expect("state").path);
        Ok(())
    }
}

/// Remove the devices that a daemon of this state file left behind; how many.
pub fn sweep(path: &Path) -> io::Result<usize> {
    let mut control = Control::open()?;
    let found = control.find(State::own(path))?;
    for number in &found {
        let _ = control.stop(*number); // one that was never started cannot be stopped
        control.delete(*number)?;
    }
    Ok(found.len())
}

/// Whether devices can be made here: makes one and removes it.
pub fn probe() -> io::Result<u64> {
    let mut control = Control::open()?;
    let features = control.features()?;
    if features & uapi::F_USER_RECOVERY == 0 {
        return Err(io::Error::other("this kernel's ublk cannot recover devices"));
    }
    let info = control.add(1 << 20, 0)?;
    control.delete(info.device)?;
    Ok(features)
}
