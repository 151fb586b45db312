//! The event loop: accepting connections, reaping children, and stopping.

use crate::app::{App, Options};
use crate::boot;
use crate::freezer::Freezer;
use crate::http::handle;
use crate::reaper::Reaper;
use crate::request_body::Connection;
use crate::VERSION;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{signal, SignalKind};

/// Blocking threads do file system work and spawn processes; each costs memory, and guests are small.
const BLOCKING_THREADS: usize = 16;

pub fn run(options: Options, address: SocketAddr, freezer: Freezer, started: Instant) -> io::Result<()> {
    raise_file_limit();
    open_standard_descriptors();
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.max_blocking_threads(BLOCKING_THREADS).thread_stack_size(512 << 10);
    builder.thread_keep_alive(Duration::from_secs(60));
    let runtime = builder.enable_all().build()?;
    runtime.block_on(serve(options, address, freezer, started))
}

async fn serve(options: Options, address: SocketAddr, freezer: Freezer, started: Instant) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    // Ctrl-alt-del arrives at PID 1 as SIGINT.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let reaper = Reaper::default();
    let app = Arc::new(App::new(options, reaper.clone(), freezer));
    tokio::spawn(reaper.run());
    let listener = TcpListener::bind(address).await?;
    let port = listener.local_addr()?.port();
    eprintln!("envd {VERSION} ready on :{port} in {} ms", started.elapsed().as_millis());
    tokio::select! {
        () = accept(listener, app.clone()) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    // Frozen processes would not see that they are to end.
    if let Err(e) = app.freezer.thaw().await {
        eprintln!("envd: {}", e.message);
    }
    if options.pid1 {
        boot::power_off();
    }
    Ok(())
}

async fn accept(listener: TcpListener, app: Arc<App>) {
    let mut server = auto::Builder::new(TokioExecutor::new());
    // Queued, not flattened: hyper's flat buffer grows to tens of megabytes behind a slow reader.
    server.http1().half_close(false).writev(true);
    server
        .http2()
        .max_concurrent_streams(10_000)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20)
        .max_frame_size(128 << 10);
    let server = Arc::new(server);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(_) => {
                // Out of descriptors or memory: let others finish.
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        // Small frames must not wait for acknowledgements.
        let _ = stream.set_nodelay(true);
        keep_alive(&stream);
        let (app, server) = (app.clone(), server.clone());
        tokio::spawn(async move {
            let connection = Arc::new(Connection::default());
            let shared = connection.clone();
            let service = service_fn(move |request| {
                let (app, connection) = (app.clone(), shared.clone());
                async move { Ok::<_, Infallible>(handle(app, connection, request).await) }
            });
            tokio::select! {
                // An error means that the client broke the connection, or the protocol: it knows.
                _ = server.serve_connection_with_upgrades(TokioIo::new(stream), service) => {}
                () = connection.gone() => {}
            }
        });
    }
}

/// Finds out about peers that vanished without a word, as all do when a snapshot is restored elsewhere.
fn keep_alive(stream: &TcpStream) {
    let options = [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 60),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 10),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3),
    ];
    for (level, name, value) in options {
        let value: libc::c_int = value;
        let size = std::mem::size_of_val(&value) as libc::socklen_t;
        // SAFETY: `value` is an int of the given size.
        unsafe { libc::setsockopt(stream.as_raw_fd(), level, name, std::ptr::addr_of!(value).cast(), size) };
    }
}

/// Many concurrent connections and commands need many descriptors.
fn raise_file_limit() {
    // SAFETY: `limit` is plain data, read and written by the calls.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) < 0 {
            return;
        }
        if libc::geteuid() == 0 {
            limit.rlim_max = limit.rlim_max.max(1 << 20);
        }
        limit.rlim_cur = limit.rlim_max.min(1 << 16).max(limit.rlim_cur);
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
}

/// Makes sure that 0, 1 and 2 are taken: a child's pipes must never get these numbers before `dup2`.
fn open_standard_descriptors() {
    loop {
        // SAFETY: plain system calls on a descriptor of our own.
        let fd = unsafe { libc::open(b"/dev/null\0".as_ptr().cast(), libc::O_RDWR) };
        if !(0..3).contains(&fd) {
            // SAFETY: as above; closing -1 is harmless.
            unsafe { libc::close(fd) };
            return;
        }
    }
}
