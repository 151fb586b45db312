//! Access token and signed file URLs.

use crate::app::App;
use crate::connect::{err, Code, RpcError};
use crate::http::{Query, Request};
use base64::engine::general_purpose::STANDARD_NO_PAD;
use base64::Engine as _;
use hyper::Method;
use sha2::{Digest as _, Sha256};
use std::time::{SystemTime, UNIX_EPOCH};

/// Lets the request through, or says why not. Without a configured token everything is allowed.
pub fn check(app: &App, request: &Request) -> Result<(), RpcError> {
    let token = match &app.settings().token {
        None => return Ok(()),
        Some(token) => token.clone(),
    };
    if let Some(given) = request.headers().get("x-access-token") {
        if same(given.as_bytes(), token.as_bytes()) {
            return Ok(());
        }
        return err(Code::Unauthenticated, "invalid access token");
    }
    if request.uri().path() == "/files" {
        let query = Query::of(request);
        if query.get("signature").is_some() {
            let write = request.method() == Method::POST;
            return check_signature(&query, if write { "write" } else { "read" }, &token);
        }
    }
    err(Code::Unauthenticated, "missing access token: send it as X-Access-Token")
}

fn check_signature(query: &Query, operation: &str, token: &str) -> Result<(), RpcError> {
    let expiration = query.get("signature_expiration");
    let path = query.get("path").unwrap_or_default();
    let user = query.get("username").unwrap_or_default();
    let wanted = sign(path, operation, user, token, expiration);
    let given = query.get("signature").unwrap_or_default();
    if !same(given.as_bytes(), wanted.as_bytes()) {
        return err(Code::Unauthenticated, "invalid signature");
    }
    let Some(expiration) = expiration else {
        return Ok(());
    };
    let Ok(expires) = expiration.parse::<u64>() else {
        return err(Code::Unauthenticated, "invalid signature expiration");
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    if expires < now.as_secs() {
        return err(Code::Unauthenticated, "signature is already expired");
    }
    Ok(())
}

/// Version 1 of E2B's file signatures (`e2b/sandbox/signature.py`).
fn sign(path: &str, operation: &str, user: &str, token: &str, expiration: Option<&str>) -> String {
    let mut raw = format!("{path}:{operation}:{user}:{token}");
    if let Some(expiration) = expiration {
        raw.push(':');
        raw.push_str(expiration);
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(raw)))
}

/// Compares without telling by its duration where the difference is.
fn same(a: &[u8], b: &[u8]) -> bool {
    let (a, b) = (Sha256::digest(a), Sha256::digest(b));
    a.iter().zip(b.iter()).fold(0, |diff, (x, y)| diff | (x ^ y)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparison() {
        assert!(same(b"token", b"token"));
        assert!(!same(b"token", b"tokem"));
        assert!(!same(b"token", b"token2"));
    }

    #[test]
    fn known_signature() {
        let with = sign("/a", "read", "root", "t", Some("5"));
        let without = sign("/a", "read", "root", "t", None);
        assert_ne!(with, without);
        assert!(with.starts_with("v1_") && !with.ends_with('='));
    }
}
