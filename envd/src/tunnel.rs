//! `GET /tunnel?port=N`: a connection of its own to a program that listens on the guest's loopback only.
//!
//! The node asks for it when the guest's address refuses the port. After `101 Switching Protocols` the connection
//! carries the program's bytes both ways, half-closes and resets included.

use crate::http::{Body, HttpError, Query, Request, Response};
use bytes::Bytes;
use hyper::header::{HeaderValue, CONNECTION, UPGRADE};
use hyper::upgrade::Upgraded;
use hyper::{StatusCode, Version};
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto::upgrade::downcast;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::TcpStream;

const PROTOCOL: &str = "tcp";
const BUFFER: usize = 64 << 10;
/// What may be a head alone, whose sender waits for an acknowledgement before it sends more.
const SMALL: usize = 4 << 10;
const ON: libc::c_int = 1;

pub async fn get(mut request: Request) -> Result<Response, HttpError> {
    let port = Query::of(&request).get("port").and_then(|p| p.parse::<u16>().ok()).filter(|p| *p > 0);
    let port = port.ok_or_else(|| HttpError::bad("port: expected a number from 1 to 65535"))?;
    let wanted = request.headers().get(UPGRADE).is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"tcp"));
    if !wanted || request.version() != Version::HTTP_11 {
        let message = format!("ask for the protocol with Upgrade: {PROTOCOL}, in HTTP/1.1");
        return Err(HttpError::new(StatusCode::UPGRADE_REQUIRED, message));
    }
    let target = connect(port).await.map_err(|e| {
        let message = format!("port {port}: {}", crate::connect::os_message(&e));
        HttpError::new(StatusCode::BAD_GATEWAY, message)
    })?;
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        if let Ok(upgraded) = upgrade.await {
            carry(upgraded, target).await;
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
    Ok(response)
}

async fn connect(port: u16) -> io::Result<TcpStream> {
    let stream = match TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
        Ok(stream) => stream,
        // The first error is told: a guest may have no IPv6 at all.
        Err(e) => TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await.map_err(|_| e)?,
    };
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn carry(upgraded: Upgraded, mut target: TcpStream) {
    let Ok(parts) = downcast::<TokioIo<TcpStream>>(upgraded) else {
        return;
    };
    let mut node = parts.io.into_inner();
    if exchange(&mut node, &mut target, &parts.read_buf).await.is_err() {
        // What broke on one side must not look like an orderly end on the other.
        reset_on_close(&node);
        reset_on_close(&target);
    }
}

async fn exchange(node: &mut TcpStream, target: &mut TcpStream, early: &Bytes) -> io::Result<()> {
    target.write_all(early).await?;
    let (mut from_node, mut to_node) = node.split();
    let (mut from_target, mut to_target) = target.split();
    tokio::try_join!(pass(&mut from_node, &mut to_target), pass(&mut from_target, &mut to_node))?;
    Ok(())
}

/// Passes everything on, and the end.
async fn pass(from: &mut ReadHalf<'_>, to: &mut WriteHalf<'_>) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let n = from.read(&mut buffer).await?;
        if n == 0 {
            return to.shutdown().await;
        }
        if n < SMALL {
            // A program that writes head and body apart, with Nagle's algorithm, waits for this.
            set(from.as_ref(), libc::IPPROTO_TCP, libc::TCP_QUICKACK, &ON);
        }
        to.write_all(&buffer[..n]).await?;
    }
}

fn reset_on_close(stream: &TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    set(stream, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
}

/// Sets an option; none of these is needed for anything to work.
fn set<T>(stream: &TcpStream, level: libc::c_int, name: libc::c_int, value: &T) {
    let size = std::mem::size_of::<T>() as libc::socklen_t;
    let value: *const T = value;
    // SAFETY: `value` has the given size and outlives the call.
    unsafe { libc::setsockopt(stream.as_raw_fd(), level, name, value.cast(), size) };
}
