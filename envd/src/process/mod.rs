//! `process.Process`: commands and terminals.

mod clone;
mod pump;
mod spawn;
pub mod table;

use crate::app::App;
use crate::connect::{client_stream, err, server_stream, timeout_of, unary};
use crate::connect::{Code, EnvelopeReader, RpcError};
use crate::freezer::Admission;
use crate::http::{unknown_method, Request, Response};
use crate::proto::*;
use crate::users::{basic_auth_user, User};
use hyper::header::HeaderMap;
use pump::{Kind, Source};
use spawn::{find_program, resize_pty, Command, SpawnError, Stdio};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use table::{write_all, Fd, Input as Sink, Process};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Dispatches one RPC by its method name.
pub async fn call(app: Arc<App>, method: &str, request: Request) -> Response {
    match method {
        "List" => unary(request, |_, _: Empty| async move { list(&app) }).await,
        "Start" => server_stream(request, |h, r| start(app, h, r)).await,
        "Connect" => server_stream(request, |_, r: SelectRequest| async move { connect(&app, r) }).await,
        "Update" => unary(request, |_, r| async move { update(&app, r) }).await,
        "SendInput" => unary(request, |_, r| async move { send_input(&app, r).await }).await,
        "StreamInput" => client_stream(request, |c, r| stream_input(app, c, r)).await,
        "SendSignal" => unary(request, |_, r| async move { send_signal(&app, r) }).await,
        "CloseStdin" => unary(request, |_, r| async move { close_stdin(&app, r).await }).await,
        _ => unknown_method(method),
    }
}

fn list(app: &App) -> Result<ListResponse, RpcError> {
    let all = app.processes.all().into_iter();
    let running = all.filter(|p| app.reaper.alive(p.pid()));
    Ok(ListResponse { processes: running.map(|p| p.info.clone()).collect() })
}

async fn start(
    app: Arc<App>,
    headers: HeaderMap,
    request: StartRequest,
) -> Result<mpsc::Receiver<Event>, RpcError> {
    let user = basic_auth_user(&headers)?;
    let kill_at = timeout_of(&headers).map(|limit| Instant::now() + limit);
    // Here, where a client that goes away ends the wait.
    let admission = admitted(&app, kill_at).await?;
    // On its own task: a client that goes away now must not leave a child that nobody owns.
    let started = tokio::spawn(async move {
        let config = request.process.clone().unwrap_or_default();
        let guard = app.reaper.begin();
        let worker = app.clone();
        let result = tokio::task::spawn_blocking(move || {
            let user = worker.user(user.as_deref())?;
            let command = prepare(&worker, &user, &config, &request)?;
            let mut exit = None;
            let spawned = spawn::spawn(&command, |pid| exit = Some(guard.register(pid)));
            drop(admission);
            Ok((spawned.map_err(|e| spawn_failed(&config, &e))?, exit, request))
        });
        let (spawned, exit, request) = match result.await {
            Ok(result) => result?,
            Err(e) => return err(Code::Internal, format!("worker failed: {e}")),
        };
        let info = ProcessInfo { config: request.process, pid: spawned.pid as u32, tag: request.tag };
        let (process, out, error) = match spawned.stdio {
            Stdio::Pty(master) => {
                let fd = watch(master)?;
                let process = Process::new(info, Some(fd.clone()), Sink::Pty(fd.clone()));
                (process, Some(Source::new(Kind::Pty, fd)), None)
            }
            Stdio::Pipes { stdin, stdout, stderr } => {
                let input = match stdin {
                    Some(fd) => Sink::Pipe(watch(fd)?),
                    None => Sink::Closed,
                };
                let out = Source::new(Kind::Stdout, watch(stdout)?);
                let error = Source::new(Kind::Stderr, watch(stderr)?);
                (Process::new(info, None, input), Some(out), Some(error))
            }
        };
        let process = Arc::new(process);
        let (Some(rx), Some(exit)) = (process.subscribe(), exit) else {
            return err(Code::Internal, "the process was not registered");
        };
        app.processes.insert(&process);
        tokio::spawn(pump::run(app, process, out, error, exit, kill_at));
        Ok(rx)
    });
    match started.await {
        Ok(result) => result,
        Err(e) => err(Code::Internal, format!("start failed: {e}")),
    }
}

/// Waits while the guest's processes are frozen, until the deadline of the call at most.
async fn admitted(app: &App, deadline: Option<Instant>) -> Result<Admission, RpcError> {
    let Some(deadline) = deadline else { return Ok(app.freezer.admit().await) };
    let admission = tokio::time::timeout_at(deadline, app.freezer.admit()).await;
    admission.map_err(|_| RpcError::new(Code::DeadlineExceeded, "the guest's processes are frozen"))
}

/// Makes `fd` non-blocking and watches it in the event loop.
fn watch(fd: OwnedFd) -> Result<Fd, RpcError> {
    // SAFETY: plain system calls on a descriptor we own. Our end only: the child's is another open file.
    unsafe {
        let flags = libc::fcntl(fd.as_raw_fd(), libc::F_GETFL);
        libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK);
    }
    // SAFETY: an `OwnedFd` stays open, and the same, until it is dropped.
    let watched = unsafe { AsyncFd::register(fd) };
    let watched = watched.map_err(|e| RpcError::new(Code::Internal, format!("watching output: {e}")))?;
    Ok(Arc::new(watched))
}

fn prepare(
    app: &App,
    user: &User,
    config: &ProcessConfig,
    request: &StartRequest,
) -> Result<Command, RpcError> {
    let cwd = working_dir(app, user, config)?;
    let env = app.command_env(user, config.envs.iter());
    let Some(program) = find_program(&config.cmd, &env, &cwd) else {
        let message = format!("executable '{}' not found in PATH", config.cmd);
        return err(Code::InvalidArgument, message);
    };
    let argv: Result<_, _> =
        [&config.cmd].into_iter().chain(&config.args).map(|text| c_string(text)).collect();
    let mut command = Command {
        program: c_string(&program)?,
        argv: argv?,
        env: environ(&env)?,
        cwd: c_string(&cwd)?,
        cwd_required: config.cwd.as_deref().is_some_and(|c| !c.is_empty()),
        uid: 0,
        gid: 0,
        groups: Vec::new(),
        pty: request.pty.map(|pty| terminal_size(&pty)),
        // Absent means true: clients that predate the field expect to send input.
        stdin: request.stdin.unwrap_or(true),
        reset_oom_score: app.options.pid1,
        group: app.freezer.group(request.pty.is_some()),
    };
    command.set_user(user);
    Ok(command)
}

fn working_dir(app: &App, user: &User, config: &ProcessConfig) -> Result<String, RpcError> {
    let asked = config.cwd.as_deref().filter(|c| !c.is_empty());
    let invalid = |message| RpcError::new(Code::InvalidArgument, message);
    let cwd = app.resolve(asked.unwrap_or_default(), user).map_err(invalid)?;
    match std::fs::metadata(&cwd) {
        Ok(meta) if meta.is_dir() => Ok(cwd),
        // A user without a home, `nobody` say, can still run commands.
        _ if asked.is_none() => Ok("/".into()),
        Ok(_) => err(Code::InvalidArgument, format!("cwd '{cwd}' is not a directory")),
        Err(_) => err(Code::InvalidArgument, format!("cwd '{cwd}' does not exist")),
    }
}

fn c_string(text: &str) -> Result<CString, RpcError> {
    CString::new(text)
        .map_err(|_| RpcError::new(Code::InvalidArgument, "arguments cannot contain a zero byte"))
}

fn environ(env: &BTreeMap<String, String>) -> Result<Vec<CString>, RpcError> {
    env.iter().map(|(k, v)| c_string(&format!("{k}={v}"))).collect()
}

fn terminal_size(pty: &Pty) -> (u16, u16) {
    let size = pty.size.unwrap_or(Size { cols: 80, rows: 24 });
    let fit = |n| u16::try_from(n).unwrap_or(u16::MAX);
    (fit(size.cols), fit(size.rows))
}

fn spawn_failed(config: &ProcessConfig, e: &SpawnError) -> RpcError {
    let code = match e.error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOMEM | libc::EMFILE | libc::ENFILE) => Code::ResourceExhausted,
        _ => Code::InvalidArgument,
    };
    let reason = crate::connect::os_message(&e.error);
    RpcError::new(code, format!("error starting process '{}': {}: {reason}", config.cmd, e.step))
}

fn connect(app: &App, request: SelectRequest) -> Result<mpsc::Receiver<Event>, RpcError> {
    let process = app.processes.find(request.process)?;
    let ended = || RpcError::new(Code::NotFound, format!("process {} has ended", process.pid()));
    process.subscribe().ok_or_else(ended)
}

fn update(app: &App, request: UpdateRequest) -> Result<Empty, RpcError> {
    let process = app.processes.find(request.process)?;
    if let Some(pty) = request.pty.filter(|p| p.size.is_some()) {
        let Some(master) = &process.pty else {
            return err(Code::FailedPrecondition, "the process has no terminal");
        };
        let (cols, rows) = terminal_size(&pty);
        resize_pty(&**master, cols, rows)
            .map_err(|e| RpcError::new(Code::Internal, format!("resizing: {e}")))?;
    }
    Ok(Empty {})
}

async fn send_input(app: &App, request: SendInputRequest) -> Result<Empty, RpcError> {
    let process = app.processes.find(request.process)?;
    write_input(&process, request.input).await?;
    Ok(Empty {})
}

async fn write_input(process: &Process, input: Option<Input>) -> Result<(), RpcError> {
    let sink = process.input.lock().await;
    let (fd, data) = match (&*sink, input.and_then(|i| i.input)) {
        (_, None) => return err(Code::InvalidArgument, "no input given"),
        (Sink::Pipe(fd), Some(InputKind::Stdin(data))) => (fd, data),
        (Sink::Pty(fd), Some(InputKind::Pty(data))) => (fd, data),
        (Sink::Pty(_), Some(InputKind::Stdin(_))) => {
            return err(Code::InvalidArgument, "the process has a terminal: send pty input");
        }
        (_, Some(InputKind::Pty(_))) => {
            return err(Code::InvalidArgument, "the process has no terminal");
        }
        (Sink::Closed, _) => {
            return err(Code::FailedPrecondition, "standard input is closed or was not enabled");
        }
    };
    let written = write_all(fd, &data).await;
    written.map_err(|e| RpcError::new(Code::FailedPrecondition, format!("writing input: {e}")))
}

async fn stream_input(
    app: Arc<App>,
    codec: crate::codec::Codec,
    mut reader: EnvelopeReader,
) -> Result<Empty, RpcError> {
    let mut target: Option<Arc<Process>> = None;
    while let Some(data) = reader.next().await? {
        let message: StreamInputRequest =
            codec.decode(&data).map_err(|e| RpcError::new(Code::InvalidArgument, e))?;
        match message.event {
            Some(StreamInputEvent::Start(start)) => target = Some(app.processes.find(start.process)?),
            Some(StreamInputEvent::Data(data)) => match &target {
                Some(process) => write_input(process, data.input).await?,
                None => return err(Code::InvalidArgument, "the stream must begin with a start event"),
            },
            Some(StreamInputEvent::Keepalive(_)) | None => {}
        }
    }
    Ok(Empty {})
}

fn send_signal(app: &App, request: SendSignalRequest) -> Result<Empty, RpcError> {
    let process = app.processes.find(request.process)?;
    if !matches!(request.signal, libc::SIGTERM | libc::SIGKILL) {
        return err(Code::InvalidArgument, format!("unsupported signal {}", request.signal));
    }
    if !app.reaper.signal_group(process.pid(), request.signal) {
        return err(Code::NotFound, format!("process {} has ended", process.pid()));
    }
    Ok(Empty {})
}

async fn close_stdin(app: &App, request: SelectRequest) -> Result<Empty, RpcError> {
    let process = app.processes.find(request.process)?;
    let mut sink = process.input.lock().await;
    if matches!(*sink, Sink::Pty(_)) {
        return err(Code::FailedPrecondition, "the input of a terminal cannot be closed");
    }
    *sink = Sink::Closed;
    Ok(Empty {})
}
