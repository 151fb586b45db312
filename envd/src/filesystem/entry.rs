//! What is told about one directory entry, and the user-defined metadata kept in its extended attributes.

use super::messages::{EntryInfo, FileType, Timestamp};
use crate::users::Names;
use std::collections::HashMap;
use std::ffi::CString;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Namespace of metadata among the extended attributes (from E2B's descriptor).
const PREFIX: &str = "user.e2b.";

/// Describes `path` itself, not what it links to; only `type` follows a link.
pub fn entry_info(path: &str, names: &Names) -> io::Result<EntryInfo> {
    let meta = fs::symlink_metadata(path)?;
    let is_symlink = meta.file_type().is_symlink();
    let (mut kind, mut symlink_target) = (file_type(&meta), None);
    if is_symlink {
        if let Ok(target) = fs::metadata(path) {
            kind = file_type(&target);
        }
        let target = fs::canonicalize(path).or_else(|_| fs::read_link(path))?;
        symlink_target = Some(target.to_string_lossy().into_owned());
    }
    Ok(EntryInfo {
        name: base_name(path).to_owned(),
        r#type: kind as i32,
        path: path.to_owned(),
        size: meta.size() as i64,
        mode: meta.mode() & 0o7777,
        permissions: permissions(meta.mode()),
        owner: names.user(meta.uid()),
        group: names.group(meta.gid()),
        modified_time: Some(Timestamp { seconds: meta.mtime(), nanos: meta.mtime_nsec() as i32 }),
        symlink_target,
        metadata: if is_symlink { HashMap::new() } else { metadata(path) },
        is_symlink,
    })
}

pub fn base_name(path: &str) -> &str {
    let name = Path::new(path).file_name().and_then(|n| n.to_str());
    name.unwrap_or("/")
}

/// Devices, sockets and pipes count as files: clients know no other kind.
fn file_type(meta: &Metadata) -> FileType {
    let kind = meta.file_type();
    if kind.is_dir() {
        FileType::Directory
    } else if kind.is_symlink() {
        FileType::Symlink
    } else {
        FileType::File
    }
}

/// The mode as `ls -l` writes it.
fn permissions(mode: u32) -> String {
    let kind = match mode & libc::S_IFMT {
        libc::S_IFDIR => 'd',
        libc::S_IFLNK => 'l',
        libc::S_IFCHR => 'c',
        libc::S_IFBLK => 'b',
        libc::S_IFIFO => 'p',
        libc::S_IFSOCK => 's',
        _ => '-',
    };
    let mut text = String::from(kind);
    let special = [(libc::S_ISUID, 's'), (libc::S_ISGID, 's'), (libc::S_ISVTX, 't')];
    for (i, (bit, letter)) in special.into_iter().enumerate() {
        let bits = mode >> (6 - 3 * i);
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & bit != 0, bits & 1 != 0) {
            (true, true) => letter,
            (true, false) => letter.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// The user-defined metadata of a file; none where the file system has no such attributes.
pub fn metadata(path: &str) -> HashMap<String, String> {
    let mut found = HashMap::new();
    let Ok(c_path) = CString::new(path) else { return found };
    for name in attribute_names(&c_path) {
        let key = name.strip_prefix(PREFIX).map(str::to_owned);
        let (Some(key), Ok(c_name)) = (key, CString::new(name)) else { continue };
        let mut value = vec![0u8; 4096];
        // SAFETY: both strings are valid, and `value` has the given room.
        let n = unsafe {
            libc::lgetxattr(c_path.as_ptr(), c_name.as_ptr(), value.as_mut_ptr().cast(), value.len())
        };
        if let Ok(n) = usize::try_from(n) {
            value.truncate(n);
            found.insert(key, String::from_utf8_lossy(&value).into_owned());
        }
    }
    found
}

/// Names under our prefix.
fn attribute_names(path: &CString) -> Vec<String> {
    // SAFETY: `path` is a valid C string; a zero size asks for the needed one.
    let size = unsafe { libc::llistxattr(path.as_ptr(), std::ptr::null_mut(), 0) };
    let Some(size) = usize::try_from(size).ok().filter(|n| *n > 0) else {
        return Vec::new();
    };
    let mut list = vec![0u8; size];
    // SAFETY: `list` has the given room.
    let n = unsafe { libc::llistxattr(path.as_ptr(), list.as_mut_ptr().cast(), size) };
    list.truncate(usize::try_from(n).unwrap_or(0));
    let names = list.split(|b| *b == 0).filter_map(|n| std::str::from_utf8(n).ok());
    names.filter(|n| n.starts_with(PREFIX)).map(str::to_owned).collect()
}

/// Replaces the metadata of a file. Nothing to set on a file system without attributes is no error.
pub fn set_metadata(path: &str, wanted: &HashMap<String, String>) -> io::Result<()> {
    let c_path = CString::new(path)?;
    for name in attribute_names(&c_path) {
        if !wanted.contains_key(&name[PREFIX.len()..]) {
            let c_name = CString::new(name)?;
            // SAFETY: both strings are valid.
            unsafe { libc::lremovexattr(c_path.as_ptr(), c_name.as_ptr()) };
        }
    }
    for (key, value) in wanted {
        let name = CString::new(format!("{PREFIX}{key}"))?;
        let data = value.as_ptr().cast();
        // SAFETY: the strings are valid, and `data` for its length.
        if unsafe { libc::lsetxattr(c_path.as_ptr(), name.as_ptr(), data, value.len(), 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permission_strings() {
        assert_eq!(permissions(libc::S_IFREG | 0o644), "-rw-r--r--");
        assert_eq!(permissions(libc::S_IFDIR | 0o1777), "drwxrwxrwt");
        assert_eq!(permissions(libc::S_IFREG | 0o4755), "-rwsr-xr-x");
        assert_eq!(permissions(libc::S_IFREG | 0o2640), "-rw-r-S---");
        assert_eq!(permissions(libc::S_IFLNK | 0o777), "lrwxrwxrwx");
    }

    #[test]
    fn names() {
        assert_eq!(base_name("/a/b.txt"), "b.txt");
        assert_eq!(base_name("/"), "/");
    }
}
