//! Message codecs: protobuf through prost, and proto3 canonical JSON by hand (base64 bytes, enums by name or
//! number, 64-bit integers as strings, unknown fields ignored, `camelCase` written and both spellings read).

use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use base64::Engine as _;
use bytes::Bytes;
use serde_json::{Map, Value};
use std::collections::HashMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    Json,
    Proto,
}

/// A message that can be read from a request.
pub trait Decode: prost::Message + Default {
    fn from_json(obj: &Obj) -> Result<Self, String>;
}

/// A message that can be written to a response.
pub trait Encode: prost::Message {
    fn write_json(&self, out: &mut String);
}

impl Codec {
    pub fn decode<M: Decode>(self, data: &[u8]) -> Result<M, String> {
        match self {
            Codec::Proto => M::decode(data).map_err(|e| format!("invalid protobuf: {e}")),
            Codec::Json if data.is_empty() => M::from_json(&Obj(&Map::new())),
            Codec::Json => match serde_json::from_slice::<Value>(data) {
                Ok(Value::Object(map)) => M::from_json(&Obj(&map)),
                Ok(_) => Err("invalid JSON: expected an object".into()),
                Err(e) => Err(format!("invalid JSON: {e}")),
            },
        }
    }

    pub fn encode<M: Encode>(self, message: &M) -> Vec<u8> {
        match self {
            Codec::Proto => message.encode_to_vec(),
            Codec::Json => {
                let mut out = String::new();
                message.write_json(&mut out);
                out.into_bytes()
            }
        }
    }
}

/// Read access to a JSON object by proto field name.
pub struct Obj<'a>(pub &'a Map<String, Value>);

impl<'a> Obj<'a> {
    fn get(&self, name: &str) -> Option<&'a Value> {
        let found = if name.contains('_') {
            self.0.get(&camel(name)).or_else(|| self.0.get(name))
        } else {
            self.0.get(name)
        };
        found.filter(|v| !v.is_null())
    }

    pub fn opt_str(&self, name: &str) -> Result<Option<String>, String> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s.clone())),
            Some(_) => Err(format!("{name}: expected a string")),
        }
    }

    pub fn str(&self, name: &str) -> Result<String, String> {
        Ok(self.opt_str(name)?.unwrap_or_default())
    }

    pub fn opt_bool(&self, name: &str) -> Result<Option<bool>, String> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(_) => Err(format!("{name}: expected a boolean")),
        }
    }

    pub fn bool(&self, name: &str) -> Result<bool, String> {
        Ok(self.opt_bool(name)?.unwrap_or_default())
    }

    /// A 32-bit unsigned integer: a JSON number, an integral float, or a decimal string.
    pub fn opt_u32(&self, name: &str) -> Result<Option<u32>, String> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = match value {
            Value::Number(n) => {
                n.as_u64().or_else(|| n.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0).map(|f| f as u64))
            }
            Value::String(s) => s.parse().ok(),
            _ => None,
        };
        let fits = number.and_then(|n| u32::try_from(n).ok());
        fits.map(Some).ok_or(format!("{name}: expected an unsigned 32-bit integer"))
    }

    pub fn u32(&self, name: &str) -> Result<u32, String> {
        Ok(self.opt_u32(name)?.unwrap_or_default())
    }

    pub fn opt_bytes(&self, name: &str) -> Result<Option<Bytes>, String> {
        let Some(text) = self.opt_str(name)? else {
            return Ok(None);
        };
        decode_base64(&text).map(|b| Some(b.into())).ok_or(format!("{name}: invalid base64"))
    }

    pub fn opt_enum(&self, name: &str, names: &[(&str, i32)]) -> Result<Option<i32>, String> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(s)) => names
                .iter()
                .find(|(n, _)| n == s)
                .map(|(_, v)| Some(*v))
                .ok_or(format!("{name}: unknown value {s:?}")),
            Some(Value::Number(n)) if n.is_i64() => Ok(n.as_i64().map(|v| v as i32)),
            Some(_) => Err(format!("{name}: expected an enum name or number")),
        }
    }

    pub fn opt_obj(&self, name: &str) -> Result<Option<Obj<'a>>, String> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Obj(map))),
            Some(_) => Err(format!("{name}: expected an object")),
        }
    }

    pub fn opt_message<M: Decode>(&self, name: &str) -> Result<Option<M>, String> {
        self.opt_obj(name)?.map(|o| M::from_json(&o)).transpose()
    }

    pub fn strings(&self, name: &str) -> Result<Vec<String>, String> {
        let bad = || format!("{name}: expected a list of strings");
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => {
                items.iter().map(|v| v.as_str().map(str::to_owned).ok_or_else(bad)).collect()
            }
            Some(_) => Err(bad()),
        }
    }

    pub fn string_map(&self, name: &str) -> Result<HashMap<String, String>, String> {
        let bad = || format!("{name}: expected an object of strings");
        match self.get(name) {
            None => Ok(HashMap::new()),
            Some(Value::Object(map)) => map
                .iter()
                .map(|(k, v)| match v.as_str() {
                    Some(text) => Ok((k.clone(), text.to_owned())),
                    None => Err(bad()),
                })
                .collect(),
            Some(_) => Err(bad()),
        }
    }
}

/// Either alphabet, padded or not: proto3 JSON readers accept all four.
pub fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let urlsafe = text.contains(['-', '_']);
    let engine = match (urlsafe, text.ends_with('=')) {
        (false, true) => &STANDARD,
        (false, false) => &STANDARD_NO_PAD,
        (true, true) => &URL_SAFE,
        (true, false) => &URL_SAFE_NO_PAD,
    };
    engine.decode(text).ok()
}

fn camel(snake: &str) -> String {
    let mut out = String::with_capacity(snake.len());
    let mut upper = false;
    for c in snake.chars() {
        if c == '_' {
            upper = true;
        } else {
            out.push(if upper { c.to_ascii_uppercase() } else { c });
            upper = false;
        }
    }
    out
}

/// Writes one JSON object field by field; fields with default values are left out by the callers' choice.
pub struct ObjWriter<'a> {
    out: &'a mut String,
    first: bool,
}

impl<'a> ObjWriter<'a> {
    pub fn new(out: &'a mut String) -> Self {
        out.push('{');
        ObjWriter { out, first: true }
    }

    /// Starts the field `key` (already camelCase) and returns the buffer for its value.
    pub fn key(&mut self, key: &str) -> &mut String {
        if !self.first {
            self.out.push(',');
        }
        self.first = false;
        self.out.push('"');
        self.out.push_str(key);
        self.out.push_str("\":");
        self.out
    }

    pub fn str(&mut self, key: &str, value: &str) {
        if !value.is_empty() {
            self.opt_str(key, Some(value));
        }
    }

    pub fn opt_str(&mut self, key: &str, value: Option<&str>) {
        if let Some(value) = value {
            write_str(self.key(key), value);
        }
    }

    pub fn bool(&mut self, key: &str, value: bool) {
        if value {
            self.key(key).push_str("true");
        }
    }

    pub fn int(&mut self, key: &str, value: i64) {
        if value != 0 {
            self.key(key).push_str(&value.to_string());
        }
    }

    /// 64-bit integers are JSON strings in proto3.
    pub fn int64(&mut self, key: &str, value: i64) {
        if value != 0 {
            let text = value.to_string();
            write_str(self.key(key), &text);
        }
    }

    pub fn bytes(&mut self, key: &str, value: &[u8]) {
        let out = self.key(key);
        out.push('"');
        STANDARD.encode_string(value, out);
        out.push('"');
    }

    pub fn string_map(&mut self, key: &str, map: &HashMap<String, String>) {
        if map.is_empty() {
            return;
        }
        let mut inner = ObjWriter::new(self.key(key));
        for (k, v) in map {
            if !inner.first {
                inner.out.push(',');
            }
            inner.first = false;
            write_str(inner.out, k);
            inner.out.push(':');
            write_str(inner.out, v);
        }
        inner.end();
    }

    pub fn strings(&mut self, key: &str, items: &[String]) {
        if items.is_empty() {
            return;
        }
        let out = self.key(key);
        out.push('[');
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push(',');
            }
            write_str(out, item);
        }
        out.push(']');
    }

    pub fn message<M: Encode>(&mut self, key: &str, value: &Option<M>) {
        if let Some(value) = value {
            value.write_json(self.key(key));
        }
    }

    pub fn messages<M: Encode>(&mut self, key: &str, items: &[M]) {
        if items.is_empty() {
            return;
        }
        let out = self.key(key);
        out.push('[');
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push(',');
            }
            item.write_json(out);
        }
        out.push(']');
    }

    pub fn end(self) {
        self.out.push('}');
    }
}

pub fn write_str(out: &mut String, value: &str) {
    // Serializing a str cannot fail.
    out.push_str(&serde_json::to_string(value).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn reads_both_spellings_and_ignores_null() {
        let m = map(r#"{"watcherId":"a","include_entry":true,"path":null}"#);
        let o = Obj(&m);
        assert_eq!(o.str("watcher_id").unwrap(), "a");
        assert!(o.bool("include_entry").unwrap());
        assert_eq!(o.opt_str("path").unwrap(), None);
    }

    #[test]
    fn numbers_enums_and_bytes() {
        let m = map(r#"{"a":"7","b":7.0,"c":-1,"s":"SIGNAL_SIGKILL","n":15,"d":"_-8=","e":"aGk"}"#);
        let o = Obj(&m);
        assert_eq!(o.u32("a").unwrap(), 7);
        assert_eq!(o.u32("b").unwrap(), 7);
        assert!(o.u32("c").is_err());
        let names = [("SIGNAL_SIGKILL", 9)];
        assert_eq!(o.opt_enum("s", &names).unwrap(), Some(9));
        assert_eq!(o.opt_enum("n", &names).unwrap(), Some(15));
        assert_eq!(o.opt_bytes("d").unwrap().unwrap(), vec![0xff, 0xef]);
        assert_eq!(o.opt_bytes("e").unwrap().unwrap(), "hi");
    }

    #[test]
    fn writes_escaped_objects() {
        let mut out = String::new();
        let mut w = ObjWriter::new(&mut out);
        w.str("path", "a\"\n");
        w.int64("size", 1 << 40);
        w.str("empty", "");
        w.bytes("stdout", b"hi");
        w.end();
        assert_eq!(out, r#"{"path":"a\"\n","size":"1099511627776","stdout":"aGk="}"#);
    }
}
