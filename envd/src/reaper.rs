//! One `waitpid(-1)` loop for every child: our commands and, as PID 1, the orphans of the whole guest.
//!
//! A command may exit before its pid is registered. While any spawn is in flight, statuses nobody owns yet are kept
//! and given to whoever registers; otherwise they belong to orphans and are dropped. Signals are sent under the same
//! lock that covers `waitpid`, so a pid that was reaped, and perhaps reused, is never signalled.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::signal::unix::{signal, SignalKind};
use tokio::sync::oneshot;

#[derive(Default)]
struct State {
    owners: HashMap<i32, oneshot::Sender<i32>>,
    unclaimed: HashMap<i32, i32>,
    spawning: usize,
}

#[derive(Clone, Default)]
pub struct Reaper(Arc<Mutex<State>>);

/// Held from before a fork until its pid is registered.
pub struct Spawning(Reaper);

impl Reaper {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reaps for as long as the runtime lives.
    pub async fn run(self) -> io::Result<()> {
        let mut child = signal(SignalKind::child())?;
        loop {
            self.reap();
            if child.recv().await.is_none() {
                return Ok(());
            }
        }
    }

    fn reap(&self) {
        let mut state = self.state();
        loop {
            let mut status = 0;
            // SAFETY: `status` outlives the call.
            let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
            if pid <= 0 {
                return;
            }
            match state.owners.remove(&pid) {
                // The owner may have stopped listening; then nobody needs the status.
                Some(owner) => drop(owner.send(status)),
                None if state.spawning > 0 => drop(state.unclaimed.insert(pid, status)),
                None => {}
            }
        }
    }

    pub fn begin(&self) -> Spawning {
        self.state().spawning += 1;
        Spawning(self.clone())
    }

    /// Whether `pid` is a registered child that was not reaped yet.
    pub fn alive(&self, pid: i32) -> bool {
        self.state().owners.contains_key(&pid)
    }

    /// Signals the process group led by our child `pid`; false when it is gone.
    pub fn signal_group(&self, pid: i32, signal: i32) -> bool {
        let state = self.state();
        // SAFETY: plain system call. The leader is not reaped while the lock is held.
        state.owners.contains_key(&pid) && unsafe { libc::kill(-pid, signal) } == 0
    }
}

impl Spawning {
    /// Gives the receiver of the wait status of `pid`.
    pub fn register(&self, pid: i32) -> oneshot::Receiver<i32> {
        let (tx, rx) = oneshot::channel();
        let mut state = self.0.state();
        match state.unclaimed.remove(&pid) {
            Some(status) => drop(tx.send(status)),
            None => drop(state.owners.insert(pid, tx)),
        }
        rx
    }
}

impl Drop for Spawning {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.spawning -= 1;
        if state.spawning == 0 {
            state.unclaimed.clear();
        }
    }
}
