//! Certificate authorities that the node adds to the guest's trust store.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// The bundles that programs read: Debian, Alpine and Arch; Fedora and RHEL; SUSE; Alpine's libraries.
const BUNDLES: [&str; 4] = [
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
];
/// Where the distributions' tools look when they write the bundles anew.
const SOURCES: [&str; 3] =
    ["usr/local/share/ca-certificates", "etc/pki/ca-trust/source/anchors", "etc/pki/trust/anchors"];
const SOURCE_NAME: &str = "agentenv.crt";

const BEGIN: &str = "# Added by AgentENV\n";
const END: &str = "# End of what AgentENV added\n";

/// Whether this is PEM with at least one certificate and nothing cut off.
pub fn valid(pem: &str) -> bool {
    let mut inside = false;
    let mut complete = 0;
    for line in pem.lines().map(str::trim) {
        match line {
            "-----BEGIN CERTIFICATE-----" if !inside => inside = true,
            "-----END CERTIFICATE-----" if inside => {
                inside = false;
                complete += 1;
            }
            _ if line.starts_with("-----") => return false,
            _ => {}
        }
    }
    !inside && complete > 0
}

/// Adds the certificates below `root`, in place of those added before. Writes nothing where they are already.
pub fn install(root: &Path, pem: &str) -> io::Result<()> {
    for source in SOURCES.iter().map(|s| root.join(s)).filter(|s| s.is_dir()) {
        write(&source.join(SOURCE_NAME), pem.as_bytes())?;
    }
    // Some are links to others.
    let existing = BUNDLES.iter().filter_map(|b| fs::canonicalize(root.join(b)).ok());
    let mut bundles: BTreeSet<PathBuf> = existing.collect();
    if bundles.is_empty() {
        bundles.insert(root.join(BUNDLES[0]));
    }
    for bundle in bundles {
        let old = match fs::read(&bundle) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            result => result?,
        };
        write(&bundle, &merge(&old, pem))?;
    }
    Ok(())
}

fn merge(old: &[u8], pem: &str) -> Vec<u8> {
    let find = |what: &str| memchr::memmem::find(old, what.as_bytes());
    let (before, after) = match (find(BEGIN), find(END)) {
        (Some(begin), Some(end)) if begin < end => (&old[..begin], &old[end + END.len()..]),
        _ => (old, &[][..]),
    };
    let mut new = before.to_vec();
    if !new.is_empty() && !new.ends_with(b"\n") {
        new.push(b'\n');
    }
    for part in [BEGIN, pem.trim_end(), "\n", END] {
        new.extend_from_slice(part.as_bytes());
    }
    new.extend_from_slice(after);
    new
}

/// Replaces the file as a whole: half a trust store would be worse than an old one.
fn write(path: &Path, data: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|old| old == data) {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut name = path.as_os_str().to_owned();
    name.push(".agentenv");
    let temporary = PathBuf::from(name);
    let result = fs::write(&temporary, data)
        .and_then(|()| fs::set_permissions(&temporary, Permissions::from_mode(0o644)))
        .and_then(|()| fs::rename(&temporary, path));
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----";
    const B: &str = "-----BEGIN CERTIFICATE-----\nBBBB\n-----END CERTIFICATE-----\n";

    #[test]
    fn pem() {
        assert!(valid(A) && valid(&format!("# one\n{A}\r\n# two\n{B}")));
        for bad in
            ["", "AAAA", &A[..40], &A[28..], "-----BEGIN PRIVATE KEY-----\nA\n-----END PRIVATE KEY-----"]
        {
            assert!(!valid(bad), "{bad}");
        }
    }

    #[test]
    fn replaces_what_was_added_before() {
        let once = merge(b"old", A);
        assert_eq!(once, format!("old\n{BEGIN}{A}\n{END}").as_bytes());
        assert_eq!(merge(&once, A), once);
        let more = [&once[..], b"later\n"].concat();
        assert_eq!(merge(&more, B), format!("old\n{BEGIN}{B}{END}later\n").as_bytes());
    }

    #[test]
    fn every_store_of_the_image() {
        let root = std::env::temp_dir().join(format!("envd-certificates-{}", std::process::id()));
        let bundle = root.join(BUNDLES[0]);
        install(&root, A).unwrap();
        assert_eq!(fs::read_to_string(&bundle).unwrap(), format!("{BEGIN}{A}\n{END}"));
        std::os::unix::fs::symlink("certs/ca-certificates.crt", root.join(BUNDLES[3])).unwrap();
        fs::create_dir_all(root.join(SOURCES[0])).unwrap();
        install(&root, B).unwrap();
        assert_eq!(fs::read_to_string(&bundle).unwrap(), format!("{BEGIN}{B}{END}"));
        assert!(root.join(BUNDLES[3]).is_symlink(), "a link stays one");
        assert_eq!(fs::read_to_string(root.join(SOURCES[0]).join(SOURCE_NAME)).unwrap(), B);
        fs::remove_dir_all(&root).unwrap();
    }
}
