//! Carries one process's output to its subscribers and ends with its exit status.

use super::table::{Fd, Process};
use crate::app::App;
use crate::proto::{DataEvent, EndEvent, Event, Output};
use bytes::{Bytes, BytesMut};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// How long after the exit of the main process its pipes may stay open in other hands (`cmd >(tee log)`, `server &`)
/// before the end event is sent all the same.
const GRACE: Duration = Duration::from_millis(200);
const CHUNK: usize = 32 << 10;

#[derive(Clone, Copy)]
pub enum Kind {
    Stdout,
    Stderr,
    Pty,
}

/// One output of a process.
pub struct Source {
    kind: Kind,
    fd: Fd,
    buf: BytesMut,
}

impl Source {
    pub fn new(kind: Kind, fd: Fd) -> Source {
        Source { kind, fd, buf: BytesMut::new() }
    }

    /// One `read(2)`; an empty result is the end.
    fn read_now(&mut self) -> io::Result<Bytes> {
        self.buf.reserve(CHUNK);
        let room = self.buf.spare_capacity_mut();
        // SAFETY: `room` is writable memory; the kernel initializes the `n` bytes that are then declared.
        unsafe {
            let n = libc::read(self.fd.as_raw_fd(), room.as_mut_ptr().cast(), room.len());
            let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
            self.buf.set_len(self.buf.len() + n);
        }
        Ok(self.buf.split().freeze())
    }

    /// Waits for output; `None` at the end. A terminal ends with EIO.
    async fn read(&mut self) -> Option<Bytes> {
        let fd = self.fd.clone();
        loop {
            let mut guard = fd.readable().await.ok()?;
            match guard.try_io(|_| self.read_now()) {
                Ok(Ok(data)) => return Some(data).filter(|d| !d.is_empty()),
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(_)) => return None,
                Err(_would_block) => {}
            }
        }
    }

    /// Bytes that can be read without waiting.
    fn pending(&self) -> usize {
        let mut n: libc::c_int = 0;
        // SAFETY: FIONREAD writes one int.
        unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::FIONREAD, &mut n) };
        usize::try_from(n).unwrap_or(0)
    }

    fn event(&self, data: Bytes) -> Event {
        let output = Some(match self.kind {
            Kind::Stdout => Output::Stdout(data),
            Kind::Stderr => Output::Stderr(data),
            Kind::Pty => Output::Pty(data),
        });
        Event::Data(DataEvent { output })
    }
}

async fn read_some(source: &mut Option<Source>) -> Option<Event> {
    match source {
        None => std::future::pending().await,
        Some(s) => s.read().await.map(|data| s.event(data)),
    }
}

/// Runs until the end event is delivered. `kill_at` is the deadline of the Start call.
pub async fn run(
    app: Arc<App>,
    process: Arc<Process>,
    mut out: Option<Source>,
    mut err: Option<Source>,
    mut exit: oneshot::Receiver<i32>,
    kill_at: Option<Instant>,
) {
    let far = Instant::now() + Duration::from_secs(365 * 86_400);
    let timer = tokio::time::sleep_until(kill_at.unwrap_or(far));
    tokio::pin!(timer);
    let mut status = None;
    while status.is_none() || out.is_some() || err.is_some() {
        tokio::select! {
            event = read_some(&mut out) => match event {
                Some(event) => process.emit(event).await,
                None => out = None,
            },
            event = read_some(&mut err) => match event {
                Some(event) => process.emit(event).await,
                None => err = None,
            },
            result = &mut exit, if status.is_none() => {
                // The sender is dropped only if the reaper is gone, and envd with it.
                status = Some(result.unwrap_or(0));
                timer.as_mut().reset(Instant::now() + GRACE);
            }
            () = &mut timer => {
                if status.is_some() {
                    break;
                }
                app.reaper.signal_group(process.pid(), libc::SIGKILL);
                timer.as_mut().reset(far);
            }
        }
    }
    // Others still hold the output open: what the process itself wrote is in the pipe already.
    for source in [&mut out, &mut err].into_iter().flatten() {
        let mut left = source.pending();
        while left > 0 {
            match source.read_now() {
                Ok(data) if !data.is_empty() => {
                    left = left.saturating_sub(data.len());
                    let event = source.event(data);
                    process.emit(event).await;
                }
                _ => break,
            }
        }
    }
    app.processes.remove(&process);
    process.finish(Event::End(end_event(status.unwrap_or(0)))).await;
    // A background process that writes to a closed pipe would be killed: keep reading for it.
    for mut source in [out, err].into_iter().flatten() {
        tokio::spawn(async move { while source.read().await.is_some() {} });
    }
}

/// Describes a wait status the way Go's `os.ProcessState` does, which E2B's clients expect.
fn end_event(status: i32) -> EndEvent {
    if libc::WIFSIGNALED(status) {
        let core = if libc::WCOREDUMP(status) { " (core dumped)" } else { "" };
        let text = format!("signal: {}{core}", signal_name(libc::WTERMSIG(status)));
        return EndEvent { exit_code: -1, exited: false, status: text.clone(), error: Some(text) };
    }
    let code = libc::WEXITSTATUS(status);
    let text = format!("exit status {code}");
    let error = (code != 0).then(|| text.clone());
    EndEvent { exit_code: code, exited: true, status: text, error }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses() {
        let exit = |code: i32| end_event(code << 8);
        assert_eq!(exit(0).status, "exit status 0");
        assert_eq!(exit(0).error, None);
        assert_eq!(exit(3).error.as_deref(), Some("exit status 3"));
        let killed = end_event(libc::SIGKILL);
        assert_eq!((killed.exit_code, killed.exited), (-1, false));
        assert_eq!(killed.status, "signal: killed");
    }
}
