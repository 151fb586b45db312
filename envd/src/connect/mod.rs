//! The Connect protocol: unary calls, server streams and client streams.

mod envelope;
mod error;
mod events;

pub use envelope::EnvelopeReader;
pub use error::{deadline, err, os_message, Code, RpcError};
pub use events::StreamEvent;

use crate::codec::{Codec, Decode, Encode};
use crate::http::{Body, Request, Response};
use bytes::BytesMut;
use envelope::{end_frame, gunzip, put_envelope, read_all};
use error::invalid;
use events::EventBody;
use hyper::header::{HeaderMap, HeaderValue, CONTENT_ENCODING, CONTENT_TYPE};
use hyper::StatusCode;
use std::future::Future;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

fn set_type(response: &mut Response, content_type: &'static str) {
    let value = HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, value);
}

/// The codec of a call, by its content type: `application/[connect+]{json,proto}`.
pub fn codec_of(headers: &HeaderMap, streaming: bool) -> Option<Codec> {
    let value = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let essence = value.split(';').next()?.trim().to_ascii_lowercase();
    let name = essence.strip_prefix("application/")?;
    let name = if streaming { name.strip_prefix("connect+")? } else { name };
    match name {
        "json" => Some(Codec::Json),
        "proto" => Some(Codec::Proto),
        _ => None,
    }
}

/// The time the client allows for a call (`Connect-Timeout-Ms`); zero or nonsense means no limit.
pub fn timeout_of(headers: &HeaderMap) -> Option<Duration> {
    let ms: u64 = headers.get("connect-timeout-ms")?.to_str().ok()?.parse().ok()?;
    (ms > 0).then(|| Duration::from_millis(ms))
}

pub fn keepalive_of(headers: &HeaderMap) -> Duration {
    let seconds = headers
        .get("keepalive-ping-interval")
        .and_then(|v| v.to_str().ok()?.trim().parse::<u64>().ok())
        .filter(|s| *s > 0);
    Duration::from_secs(seconds.unwrap_or(90).min(86_400))
}

/// Runs one unary call: decode, `handler`, encode; errors become Connect error JSON.
pub async fn unary<Req, Res, F>(request: Request, handler: impl FnOnce(HeaderMap, Req) -> F) -> Response
where
    Req: Decode,
    Res: Encode,
    F: Future<Output = Result<Res, RpcError>>,
{
    let (parts, body) = request.into_parts();
    let Some(codec) = codec_of(&parts.headers, false) else {
        return unsupported_type();
    };
    let timeout = timeout_of(&parts.headers);
    let call = async {
        let gzip = parts.headers.get(CONTENT_ENCODING).is_some_and(|v| v == "gzip");
        let data = read_all(body).await?;
        let data = if gzip { gunzip(&data)? } else { data };
        let message = codec.decode(&data).map_err(invalid)?;
        handler(parts.headers, message).await
    };
    let result = match timeout {
        None => call.await,
        Some(limit) => tokio::time::timeout(limit, call).await.unwrap_or_else(|_| Err(deadline())),
    };
    match result {
        Err(e) => e.response(),
        Ok(message) => {
            let mut response = Response::new(Body::full(codec.encode(&message)));
            let json = codec == Codec::Json;
            set_type(&mut response, if json { "application/json" } else { "application/proto" });
            response
        }
    }
}

/// Runs a server-streaming call: `handler` gets the request and gives the receiver of the events.
pub async fn server_stream<Req, E, F>(request: Request, handler: impl FnOnce(HeaderMap, Req) -> F) -> Response
where
    Req: Decode,
    E: StreamEvent,
    F: Future<Output = Result<mpsc::Receiver<E>, RpcError>>,
{
    let (parts, body) = request.into_parts();
    let Some(codec) = codec_of(&parts.headers, true) else {
        return unsupported_type();
    };
    let deadline = timeout_of(&parts.headers).map(|limit| Instant::now() + limit);
    let period = keepalive_of(&parts.headers);
    let first = async {
        let gzip = stream_gzip(&parts.headers);
        let mut reader = EnvelopeReader::new(body, gzip);
        let Some(data) = reader.next().await? else {
            return err(Code::InvalidArgument, "the request stream has no message");
        };
        let message = codec.decode(&data).map_err(invalid)?;
        handler(parts.headers, message).await
    };
    match first.await {
        Err(e) => stream_response(codec, Body::full(end_frame(Some(&e)))),
        Ok(rx) => {
            let events = EventBody::new(rx, codec, period, deadline);
            stream_response(codec, Body::stream(events))
        }
    }
}

/// Runs a client-streaming call; `handler` pulls the messages itself.
pub async fn client_stream<Res, F>(
    request: Request,
    handler: impl FnOnce(Codec, EnvelopeReader) -> F,
) -> Response
where
    Res: Encode,
    F: Future<Output = Result<Res, RpcError>>,
{
    let (parts, body) = request.into_parts();
    let Some(codec) = codec_of(&parts.headers, true) else {
        return unsupported_type();
    };
    let reader = EnvelopeReader::new(body, stream_gzip(&parts.headers));
    let call = handler(codec, reader);
    let result = match timeout_of(&parts.headers) {
        None => call.await,
        Some(limit) => tokio::time::timeout(limit, call).await.unwrap_or_else(|_| Err(deadline())),
    };
    let body = match result {
        Err(e) => end_frame(Some(&e)),
        Ok(message) => {
            let mut out = BytesMut::new();
            put_envelope(&mut out, 0, &codec.encode(&message));
            out.extend_from_slice(&end_frame(None));
            out.freeze()
        }
    };
    stream_response(codec, Body::full(body))
}

fn stream_response(codec: Codec, body: Body) -> Response {
    let mut response = Response::new(body);
    let json = codec == Codec::Json;
    set_type(&mut response, if json { "application/connect+json" } else { "application/connect+proto" });
    response
}

fn unsupported_type() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    let accepted = "application/json, application/proto, application/connect+json, application/connect+proto";
    let value = HeaderValue::from_static(accepted);
    response.headers_mut().insert("accept-post", value);
    response
}

fn stream_gzip(headers: &HeaderMap) -> bool {
    headers.get("connect-content-encoding").is_some_and(|v| v == "gzip")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codecs_by_content_type() {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/connect+json; charset=utf-8"));
        assert_eq!(codec_of(&headers, true), Some(Codec::Json));
        assert_eq!(codec_of(&headers, false), None);
    }
}
