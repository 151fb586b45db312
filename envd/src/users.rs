//! Users, groups and path resolution. A static binary has no NSS, so `/etc/passwd` and `/etc/group` are parsed here.

use crate::connect::{Code, RpcError};
use base64::Engine as _;
use hyper::header::{HeaderMap, AUTHORIZATION};
use std::collections::HashMap;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: String,
    pub shell: String,
}

impl User {
    /// The line of `name` in passwd text. A missing home or shell gets the traditional default.
    fn parse(passwd: &str, name: &str) -> Option<User> {
        let line = passwd.lines().find(|l| l.split(':').next() == Some(name))?;
        let mut fields = line.split(':').skip(2);
        let uid = fields.next()?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        let or = |value: Option<&str>, default: &str| match value {
            None | Some("") => default.to_owned(),
            Some(v) => v.to_owned(),
        };
        let (home, shell) = (fields.nth(1), fields.next());
        Some(User { name: name.to_owned(), uid, gid, home: or(home, "/"), shell: or(shell, "/bin/sh") })
    }

    /// Looks `name` up. An image without a passwd file still has root.
    pub fn find(name: &str) -> Result<User, RpcError> {
        let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        if let Some(user) = User::parse(&passwd, name) {
            return Ok(user);
        }
        if name == "root" {
            let (home, shell) = ("/root".to_owned(), "/bin/sh".to_owned());
            let name = name.to_owned();
            return Ok(User { name, uid: 0, gid: 0, home, shell });
        }
        let message = format!("error looking up user '{name}': user: unknown user {name}");
        Err(RpcError::new(Code::Unauthenticated, message))
    }

    /// The user that envd runs as.
    pub fn current() -> Result<User, RpcError> {
        // SAFETY: plain system call.
        let uid = unsafe { libc::geteuid() }.to_string();
        let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let mut lines = passwd.lines().map(|l| l.split(':').collect::<Vec<_>>());
        let name = lines.find(|f| f.get(2) == Some(&uid.as_str())).map(|f| f[0]);
        User::find(name.unwrap_or(&uid))
    }

    /// Supplementary groups, the primary one first.
    pub fn groups(&self) -> Vec<u32> {
        let text = std::fs::read_to_string("/etc/group").unwrap_or_default();
        parse_groups(&text, &self.name, self.gid)
    }
}

fn parse_groups(text: &str, name: &str, primary: u32) -> Vec<u32> {
    let mut groups = vec![primary];
    for line in text.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [_, _, gid, members] = fields[..] else { continue };
        if let Ok(gid) = gid.parse() {
            if members.split(',').any(|m| m.trim() == name) && !groups.contains(&gid) {
                groups.push(gid);
            }
        }
    }
    groups
}

/// The user of an RPC: HTTP basic authentication carries the name, without a password.
pub fn basic_auth_user(headers: &HeaderMap) -> Result<Option<String>, RpcError> {
    let Some(value) = headers.get(AUTHORIZATION) else {
        return Ok(None);
    };
    let name = value.to_str().ok().and_then(|text| {
        let (scheme, encoded) = text.split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("basic") {
            return Some(String::new());
        }
        let decoded = base64::engine::general_purpose::STANDARD.decode(encoded.trim()).ok()?;
        let text = String::from_utf8(decoded).ok()?;
        Some(text.split(':').next().unwrap_or_default().to_owned())
    });
    match name {
        None => Err(RpcError::new(Code::Unauthenticated, "invalid Authorization header")),
        Some(name) => Ok(Some(name).filter(|n| !n.is_empty())),
    }
}

/// Resolves a path of a request: `~` and relative paths against the user, `.` and `..` lexically.
pub fn resolve(path: &str, home: &str, workdir: Option<&str>) -> Result<String, String> {
    if path.contains('\0') {
        return Err("a path cannot contain a zero byte".into());
    }
    if path == "~" {
        return Ok(clean(home));
    }
    if let Some(rest) = path.strip_prefix("~/") {
        return Ok(clean(&format!("{home}/{rest}")));
    }
    if path.starts_with('~') {
        return Err(format!("cannot expand the home directory of another user: '{path}'"));
    }
    if path.starts_with('/') {
        return Ok(clean(path));
    }
    let base = match workdir {
        None | Some("") => home.to_owned(),
        // The default working directory may itself be written with `~`.
        Some(dir) if dir.starts_with(['/', '~']) => resolve(dir, home, None)?,
        Some(dir) => format!("{home}/{dir}"),
    };
    Ok(clean(&format!("{base}/{path}")))
}

/// An absolute path without empty, `.` and `..` components.
fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

/// Names of owners and groups, read once per request.
pub struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    pub fn load() -> Names {
        let read = |path| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let mut names = HashMap::new();
            for line in text.lines() {
                let mut fields = line.split(':');
                let (name, id) = (fields.next(), fields.nth(1).and_then(|v| v.parse().ok()));
                if let (Some(name), Some(id)) = (name, id) {
                    names.entry(id).or_insert_with(|| name.to_owned());
                }
            }
            names
        };
        Names { users: read("/etc/passwd"), groups: read("/etc/group") }
    }

    pub fn user(&self, uid: u32) -> String {
        self.users.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }

    pub fn group(&self, gid: u32) -> String {
        self.groups.get(&gid).cloned().unwrap_or_else(|| gid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwd_lines() {
        let text = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1001::/home/user:\nbad:x:z\n";
        let user = User::parse(text, "user").unwrap();
        assert_eq!((user.uid, user.gid, user.home.as_str()), (1000, 1001, "/home/user"));
        assert_eq!(user.shell, "/bin/sh");
        assert_eq!(User::parse(text, "bad"), None);
        assert_eq!(User::parse(text, "roo"), None);
    }

    #[test]
    fn group_membership() {
        let text = "root:x:0:\nsudo:x:27:bob,user\nuser:x:1001:user\nnear:x:5:username\n";
        assert_eq!(parse_groups(text, "user", 1001), [1001, 27]);
    }

    #[test]
    fn paths() {
        let r = |p, w| resolve(p, "/home/user", w);
        assert_eq!(r("a/../b", None).unwrap(), "/home/user/b");
        assert_eq!(r("b", Some("/work/")).unwrap(), "/work/b");
        assert_eq!(r("b", Some("sub")).unwrap(), "/home/user/sub/b");
        assert_eq!(r("", Some("~/w")).unwrap(), "/home/user/w");
        assert_eq!(r("~", Some("/work")).unwrap(), "/home/user");
        assert_eq!(r("~/x//y/.", None).unwrap(), "/home/user/x/y");
        assert_eq!(r("/../..", None).unwrap(), "/");
        assert!(r("~root/x", None).is_err());
        assert!(r("a\0b", None).is_err());
    }
}
