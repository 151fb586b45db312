//! `POST /init`: clock, entropy, identity and defaults, after boot and after every restore. On the resume path.

use crate::app::App;
use crate::certificates;
use crate::clock_entropy::{add_entropy, parse_rfc3339, set_clock};
use crate::codec::decode_base64;
use crate::http::{blocking, no_content, read_body, HttpError, Request, Response};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The body of the request. Whether the caller may send it was decided by the access token in force until now.
#[derive(Default)]
struct Init {
    env: Option<BTreeMap<String, String>>,
    token: Option<String>,
    /// Nanoseconds since 1970.
    time: Option<i64>,
    default_user: Option<String>,
    default_workdir: Option<String>,
    entropy: Option<Vec<u8>>,
    hostname: Option<String>,
    sandbox_id: Option<String>,
    template_id: Option<String>,
    ca_bundle: Option<String>,
}

fn text(body: &Map<String, Value>, key: &str) -> Result<Option<String>, HttpError> {
    match body.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(s)) => Ok(Some(s.clone()).filter(|s| !s.is_empty())),
        Some(_) => Err(HttpError::bad(format!("{key}: expected a string"))),
    }
}

fn parse(data: &[u8]) -> Result<Init, HttpError> {
    // An empty body is a bare health-checked init.
    if data.is_empty() {
        return Ok(Init::default());
    }
    let value = serde_json::from_slice(data).map_err(|e| HttpError::bad(format!("invalid JSON: {e}")))?;
    let Value::Object(body) = value else {
        return Err(HttpError::bad("expected a JSON object"));
    };
    let env = match body.get("envVars") {
        None | Some(Value::Null) => None,
        Some(Value::Object(map)) => {
            let pairs = map.iter().map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned())));
            let env: Option<BTreeMap<_, _>> = pairs.collect();
            let valid = env.filter(|e| e.iter().all(|(k, v)| valid_env(k, v)));
            Some(valid.ok_or_else(|| HttpError::bad("envVars: expected names and string values"))?)
        }
        Some(_) => return Err(HttpError::bad("envVars: expected an object")),
    };
    let time = match text(&body, "timestamp")? {
        None => None,
        Some(t) => Some(parse_rfc3339(&t).ok_or_else(|| HttpError::bad("timestamp: expected RFC 3339"))?),
    };
    let entropy = match text(&body, "entropy")? {
        None => None,
        Some(t) => Some(decode_base64(&t).ok_or_else(|| HttpError::bad("entropy: invalid base64"))?),
    };
    let hostname = text(&body, "hostname")?;
    if let Some(name) = hostname.as_deref().filter(|n| !valid_hostname(n)) {
        return Err(HttpError::bad(format!("hostname: '{name}' is not a valid name")));
    }
    let ca_bundle = text(&body, "caBundle")?;
    if ca_bundle.as_deref().is_some_and(|pem| !certificates::valid(pem)) {
        return Err(HttpError::bad("caBundle: expected certificates in PEM"));
    }
    Ok(Init {
        env,
        token: text(&body, "accessToken")?,
        time,
        default_user: text(&body, "defaultUser")?,
        default_workdir: text(&body, "defaultWorkdir")?,
        entropy,
        hostname,
        sandbox_id: text(&body, "sandboxId")?,
        template_id: text(&body, "templateId")?,
        ca_bundle,
    })
}

fn valid_env(name: &str, value: &str) -> bool {
    !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0')
}

fn valid_hostname(name: &str) -> bool {
    name.len() <= 64 && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
}

pub async fn post(app: Arc<App>, request: Request) -> Result<Response, HttpError> {
    let data = read_body(request.into_body(), 4 << 20).await?;
    let init = parse(&data)?;
    // First of all the clock and the generator: what follows may use them.
    if let Some(time) = init.time.filter(|_| app.options.set_clock) {
        let set = set_clock(time);
        set.map_err(|e| HttpError::bad(format!("setting the clock: {e}")))?;
    }
    if let Some(entropy) = &init.entropy {
        if let Err(e) = add_entropy(entropy) {
            // Without privileges (development) the host's generator is not ours to reseed.
            if app.options.pid1 {
                return Err(HttpError::io("/dev/urandom", &e));
            }
        }
    }
    {
        let mut settings = app.settings();
        settings.token = init.token;
        if let Some(env) = init.env {
            settings.env = env;
        }
        let replace = |old: &mut Option<String>, new: &Option<String>| {
            if new.is_some() {
                old.clone_from(new);
            }
        };
        replace(&mut settings.default_user, &init.default_user);
        replace(&mut settings.default_workdir, &init.default_workdir);
        replace(&mut settings.sandbox_id, &init.sandbox_id);
        replace(&mut settings.template_id, &init.template_id);
    }
    // Processes that were frozen for the snapshot go on now: they see the clock and the entropy of this life. Before
    // anything that takes a worker thread, since those may wait for a file that a frozen process serves.
    app.freezer.thaw().await?;
    if app.options.pid1 {
        let (hostname, sandbox, template) = (init.hostname, init.sandbox_id, init.template_id);
        let written =
            blocking(move || write_identity(hostname.as_deref(), sandbox.as_deref(), template.as_deref()));
        if let Err(e) = written.await? {
            // An image may have a read-only /etc; commands still run.
            eprintln!("envd: writing the identity: {e}");
        }
        if let Some(bundle) = init.ca_bundle {
            // Connections that would fail later, and not say why, are worse than a failed start.
            let installed = blocking(move || certificates::install(Path::new("/"), &bundle)).await?;
            installed.map_err(|e| HttpError::io("caBundle", &e))?;
        }
    }
    Ok(no_content())
}

/// Host name, and the identity files that E2B's guests have.
fn write_identity(hostname: Option<&str>, sandbox: Option<&str>, template: Option<&str>) -> io::Result<()> {
    if sandbox.is_some() || template.is_some() {
        fs::create_dir_all("/run/e2b")?;
        fs::write("/run/e2b/.E2B_SANDBOX", "true")?;
    }
    if let Some(id) = sandbox {
        fs::write("/run/e2b/.E2B_SANDBOX_ID", id)?;
    }
    if let Some(id) = template {
        fs::write("/run/e2b/.E2B_TEMPLATE_ID", id)?;
    }
    if let Some(name) = hostname {
        set_hostname(name)?;
    }
    Ok(())
}

/// Sets the host name and makes it resolve.
pub fn set_hostname(name: &str) -> io::Result<()> {
    // SAFETY: the pointer is valid for the given length.
    if unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
    let updated = update_hosts(&hosts, name);
    if updated != hosts {
        fs::write("/etc/hosts", updated)?;
    }
    Ok(())
}

/// The hosts file with `127.0.1.1 name` as its one line for that address, and with localhost.
fn update_hosts(hosts: &str, name: &str) -> String {
    let address = |line: &str| line.split_whitespace().next().map(str::to_owned);
    let mut out = String::new();
    if !hosts.lines().any(|l| address(l).as_deref() == Some("127.0.0.1")) {
        out.push_str("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n");
    }
    for line in hosts.lines().filter(|l| address(l).as_deref() != Some("127.0.1.1")) {
        out.push_str(line);
        out.push('\n');
    }
    out.push_str(&format!("127.0.1.1 {name}\n"));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_lines() {
        let first = update_hosts("127.0.0.1 localhost\n127.0.1.1\told\n10.0.0.1 x", "new");
        assert_eq!(first, "127.0.0.1 localhost\n10.0.0.1 x\n127.0.1.1 new\n");
        assert_eq!(update_hosts(&first, "new"), first);
        assert!(update_hosts("", "n").starts_with("127.0.0.1 localhost\n"));
    }

    #[test]
    fn bodies() {
        let init = parse(br#"{"envVars":{"A":"1"},"accessToken":"","timestamp":null,"later":{}}"#).unwrap();
        assert_eq!(init.env.unwrap()["A"], "1");
        assert_eq!(init.token, None);
        assert!(parse(b"").unwrap().env.is_none());
        for bad in [
            r#"[]"#,
            r#"{"timestamp":"x"}"#,
            r#"{"hostname":"a b"}"#,
            r#"{"envVars":{"A":1}}"#,
            r#"{"caBundle":"x"}"#,
        ] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
