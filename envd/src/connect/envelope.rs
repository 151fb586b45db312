//! Envelopes of messages, and reading them from request bodies.

use super::{err, invalid, Code, RpcError};
use crate::codec::write_str;
use crate::request_body::RequestBody;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use http_body_util::BodyExt as _;
use std::io::Read as _;

/// Largest message accepted; the guest's memory is small and inputs are streamed in pieces.
const MAX_MESSAGE: usize = 64 << 20;
const END_STREAM: u8 = 2;
const COMPRESSED: u8 = 1;

/// The whole body of a unary call.
pub async fn read_all(mut body: RequestBody) -> Result<Bytes, RpcError> {
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| invalid(format!("reading the request: {e}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if first.is_empty() && rest.is_empty() {
            first = data;
            continue;
        }
        if rest.is_empty() {
            rest.extend_from_slice(&first);
        }
        rest.extend_from_slice(&data);
        if rest.len() > MAX_MESSAGE {
            return err(Code::ResourceExhausted, "the request is too large");
        }
    }
    Ok(if rest.is_empty() { first } else { rest.freeze() })
}

pub fn gunzip(data: &[u8]) -> Result<Bytes, RpcError> {
    let mut out = Vec::new();
    flate2::read::MultiGzDecoder::new(data)
        .take(MAX_MESSAGE as u64)
        .read_to_end(&mut out)
        .map_err(|e| invalid(format!("invalid gzip: {e}")))?;
    Ok(out.into())
}

/// Appends one envelope: flags, big-endian length, payload.
pub fn put_envelope(out: &mut BytesMut, flags: u8, payload: &[u8]) {
    out.reserve(5 + payload.len());
    out.put_u8(flags);
    out.put_u32(payload.len() as u32);
    out.put_slice(payload);
}

/// The envelope that ends a stream, with the error that ended it.
pub fn end_frame(error: Option<&RpcError>) -> Bytes {
    let mut json = String::from("{");
    if let Some(e) = error {
        write_str(&mut json, "error");
        json.push(':');
        json.push_str(&e.json());
    }
    json.push('}');
    let mut out = BytesMut::new();
    put_envelope(&mut out, END_STREAM, json.as_bytes());
    out.freeze()
}

/// Takes one whole envelope off the front of `buf`, if it is there.
fn take_envelope(buf: &mut BytesMut) -> Result<Option<(u8, Bytes)>, RpcError> {
    if buf.len() < 5 {
        return Ok(None);
    }
    let size = u32::from_be_bytes([buf[1], buf[2], buf[3], buf[4]]) as usize;
    if size > MAX_MESSAGE {
        return err(Code::ResourceExhausted, format!("message of {size} bytes is too large"));
    }
    if buf.len() < 5 + size {
        return Ok(None);
    }
    let flags = buf[0];
    buf.advance(5);
    Ok(Some((flags, buf.split_to(size).freeze())))
}

/// Reads enveloped messages from a request body.
pub struct EnvelopeReader {
    body: RequestBody,
    buf: BytesMut,
    gzip: bool,
}

impl EnvelopeReader {
    pub fn new(body: RequestBody, gzip: bool) -> Self {
        let buf = BytesMut::new();
        EnvelopeReader { body, buf, gzip }
    }

    /// The next message, or `None` at the end of the stream.
    pub async fn next(&mut self) -> Result<Option<Bytes>, RpcError> {
        loop {
            if let Some((flags, data)) = take_envelope(&mut self.buf)? {
                if flags & END_STREAM != 0 {
                    return Ok(None);
                }
                if flags & COMPRESSED == 0 {
                    return Ok(Some(data));
                }
                if !self.gzip {
                    return err(Code::InvalidArgument, "compressed message without a known encoding");
                }
                return gunzip(&data).map(Some);
            }
            match self.body.frame().await {
                None if self.buf.is_empty() => return Ok(None),
                None => return err(Code::InvalidArgument, "the stream ends inside a message"),
                Some(Err(e)) => return Err(invalid(format!("reading the request: {e}"))),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buf.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Code;
    use super::*;

    #[test]
    fn envelopes_split_anywhere() {
        let mut whole = BytesMut::new();
        put_envelope(&mut whole, 0, b"hello");
        put_envelope(&mut whole, END_STREAM, b"{}");
        let mut buf = BytesMut::new();
        let mut seen = Vec::new();
        for byte in whole {
            buf.put_u8(byte);
            while let Some(envelope) = take_envelope(&mut buf).unwrap() {
                seen.push(envelope);
            }
        }
        assert_eq!(seen, [(0, "hello".into()), (END_STREAM, "{}".into())]);
        assert!(buf.is_empty());
    }

    #[test]
    fn refuses_huge_messages() {
        let mut buf = BytesMut::from(&b"\x00\xff\xff\xff\xff"[..]);
        let e = take_envelope(&mut buf).unwrap_err();
        assert_eq!(e.code, Code::ResourceExhausted);
    }

    #[test]
    fn end_frame_carries_the_error() {
        let frame = end_frame(Some(&RpcError::new(Code::NotFound, "no \"x\"")));
        assert_eq!(frame[0], END_STREAM);
        assert_eq!(&frame[5..], br#"{"error":{"code":"not_found","message":"no \"x\""}}"#);
    }
}
