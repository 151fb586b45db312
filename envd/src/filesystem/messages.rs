//! Messages of `filesystem.Filesystem`; field numbers come from the descriptors in the `e2b` package.

use crate::codec::{write_str, Decode, Encode, Obj, ObjWriter};
use crate::proto::Empty;
use prost::{Message, Oneof};
use std::collections::HashMap;

/// `StatRequest`, `MakeDirRequest` and `RemoveRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct PathRequest {
    #[prost(string, tag = "1")]
    pub path: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct MoveRequest {
    #[prost(string, tag = "1")]
    pub source: String,
    #[prost(string, tag = "2")]
    pub destination: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ListDirRequest {
    #[prost(string, tag = "1")]
    pub path: String,
    #[prost(uint32, tag = "2")]
    pub depth: u32,
}

/// `WatchDirRequest` and `CreateWatcherRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct WatchRequest {
    #[prost(string, tag = "1")]
    pub path: String,
    #[prost(bool, tag = "2")]
    pub recursive: bool,
    #[prost(bool, tag = "3")]
    pub include_entry: bool,
    #[prost(bool, tag = "4")]
    pub allow_network_mounts: bool,
}

/// `GetWatcherEventsRequest`, `RemoveWatcherRequest` and `CreateWatcherResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct WatcherId {
    #[prost(string, tag = "1")]
    pub watcher_id: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum FileType {
    Unspecified = 0,
    File = 1,
    Directory = 2,
    Symlink = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum EventType {
    Unspecified = 0,
    Create = 1,
    Write = 2,
    Remove = 3,
    Rename = 4,
    Chmod = 5,
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Timestamp {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct EntryInfo {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(enumeration = "FileType", tag = "2")]
    pub r#type: i32,
    #[prost(string, tag = "3")]
    pub path: String,
    #[prost(int64, tag = "4")]
    pub size: i64,
    #[prost(uint32, tag = "5")]
    pub mode: u32,
    #[prost(string, tag = "6")]
    pub permissions: String,
    #[prost(string, tag = "7")]
    pub owner: String,
    #[prost(string, tag = "8")]
    pub group: String,
    #[prost(message, optional, tag = "9")]
    pub modified_time: Option<Timestamp>,
    #[prost(string, optional, tag = "10")]
    pub symlink_target: Option<String>,
    #[prost(map = "string, string", tag = "11")]
    pub metadata: HashMap<String, String>,
    /// The entry itself is a link; `type` is then what it leads to.
    #[prost(bool, tag = "12")]
    pub is_symlink: bool,
}

/// `StatResponse`, `MakeDirResponse` and `MoveResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct EntryResponse {
    #[prost(message, optional, tag = "1")]
    pub entry: Option<EntryInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ListDirResponse {
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<EntryInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub struct FilesystemEvent {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(enumeration = "EventType", tag = "2")]
    pub r#type: i32,
    #[prost(message, optional, tag = "3")]
    pub entry: Option<EntryInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatcherEvents {
    #[prost(message, repeated, tag = "1")]
    pub events: Vec<FilesystemEvent>,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchDirResponse {
    #[prost(oneof = "WatchEvent", tags = "1, 2, 3")]
    pub event: Option<WatchEvent>,
}

// Nearly every value is the large one.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, PartialEq, Oneof)]
pub enum WatchEvent {
    #[prost(message, tag = "1")]
    Start(Empty),
    #[prost(message, tag = "2")]
    Filesystem(FilesystemEvent),
    #[prost(message, tag = "3")]
    Keepalive(Empty),
}

impl Decode for PathRequest {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(PathRequest { path: o.str("path")? })
    }
}

impl Decode for MoveRequest {
    fn from_json(o: &Obj) -> Result<Self, String> {
        let (source, destination) = (o.str("source")?, o.str("destination")?);
        Ok(MoveRequest { source, destination })
    }
}

impl Decode for ListDirRequest {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(ListDirRequest { path: o.str("path")?, depth: o.u32("depth")? })
    }
}

impl Decode for WatchRequest {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(WatchRequest {
            path: o.str("path")?,
            recursive: o.bool("recursive")?,
            include_entry: o.bool("include_entry")?,
            allow_network_mounts: o.bool("allow_network_mounts")?,
        })
    }
}

impl Decode for WatcherId {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(WatcherId { watcher_id: o.str("watcher_id")? })
    }
}

impl Encode for WatcherId {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        w.str("watcherId", &self.watcher_id);
        w.end();
    }
}

impl Encode for EntryInfo {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        w.str("name", &self.name);
        match self.r#type() {
            FileType::Unspecified => {}
            FileType::File => w.str("type", "FILE_TYPE_FILE"),
            FileType::Directory => w.str("type", "FILE_TYPE_DIRECTORY"),
            FileType::Symlink => w.str("type", "FILE_TYPE_SYMLINK"),
        }
        w.str("path", &self.path);
        w.int64("size", self.size);
        w.int("mode", self.mode.into());
        w.str("permissions", &self.permissions);
        w.str("owner", &self.owner);
        w.str("group", &self.group);
        if let Some(time) = &self.modified_time {
            write_str(w.key("modifiedTime"), &rfc3339(time));
        }
        w.opt_str("symlinkTarget", self.symlink_target.as_deref());
        w.string_map("metadata", &self.metadata);
        w.bool("isSymlink", self.is_symlink);
        w.end();
    }
}

impl Encode for EntryResponse {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        w.message("entry", &self.entry);
        w.end();
    }
}

impl Encode for ListDirResponse {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        w.messages("entries", &self.entries);
        w.end();
    }
}

impl Encode for FilesystemEvent {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        w.str("name", &self.name);
        match self.r#type() {
            EventType::Unspecified => {}
            EventType::Create => w.str("type", "EVENT_TYPE_CREATE"),
            EventType::Write => w.str("type", "EVENT_TYPE_WRITE"),
            EventType::Remove => w.str("type", "EVENT_TYPE_REMOVE"),
            EventType::Rename => w.str("type", "EVENT_TYPE_RENAME"),
            EventType::Chmod => w.str("type", "EVENT_TYPE_CHMOD"),
        }
        w.message("entry", &self.entry);
        w.end();
    }
}

impl Encode for WatcherEvents {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        w.messages("events", &self.events);
        w.end();
    }
}

impl Encode for WatchDirResponse {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        match &self.event {
            None => {}
            Some(WatchEvent::Start(_)) => w.key("start").push_str("{}"),
            Some(WatchEvent::Filesystem(event)) => event.write_json(w.key("filesystem")),
            Some(WatchEvent::Keepalive(_)) => w.key("keepalive").push_str("{}"),
        }
        w.end();
    }
}

/// The JSON form of a timestamp, with as many fraction digits as it needs (none, 3, 6 or 9).
fn rfc3339(time: &Timestamp) -> String {
    let (days, second) = (time.seconds.div_euclid(86_400), time.seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let fraction = match time.nanos {
        0 => String::new(),
        n if n % 1_000_000 == 0 => format!(".{:03}", n / 1_000_000),
        n if n % 1000 == 0 => format!(".{:06}", n / 1000),
        n => format!(".{n:09}"),
    };
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}Z")
}

/// Gregorian date of a day number since 1970 (Howard Hinnant's `civil_from_days`).
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps() {
        let t = |seconds, nanos| rfc3339(&Timestamp { seconds, nanos });
        assert_eq!(t(0, 0), "1970-01-01T00:00:00Z");
        assert_eq!(t(951_782_399, 0), "2000-02-28T23:59:59Z");
        assert_eq!(t(951_782_400, 5_000_000), "2000-02-29T00:00:00.005Z");
        assert_eq!(t(1_700_000_000, 1), "2023-11-14T22:13:20.000000001Z");
        assert_eq!(t(-1, 0), "1969-12-31T23:59:59Z");
    }
}
