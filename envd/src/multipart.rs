//! Incremental `multipart/form-data` parser: bytes in, events out, no I/O.

use memchr::memmem::find;

/// Longest part header section accepted.
const MAX_HEADERS: usize = 64 << 10;

#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A part begins, with its field name and file name.
    Part {
        name: String,
        filename: Option<String>,
    },
    Data(Vec<u8>),
    /// The current part is complete.
    PartEnd,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Preamble,
    /// Just behind a boundary: a line end or the final `--`.
    Boundary,
    Headers,
    Data,
    Done,
}

pub struct Parser {
    /// CR LF `--` boundary.
    delimiter: Vec<u8>,
    buf: Vec<u8>,
    state: State,
}

/// The boundary of a `multipart/form-data` content type.
pub fn boundary(content_type: &str) -> Option<String> {
    let (essence, parameters) = content_type.split_once(';')?;
    if !essence.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    parameter(parameters, "boundary").filter(|b| !b.is_empty())
}

/// The value of `name` among `; key=value` parameters, unquoted.
fn parameter(text: &str, name: &str) -> Option<String> {
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches(|c: char| c == ';' || c.is_whitespace());
        let (key, after) = rest.split_once('=')?;
        let (value, remaining) = match after.strip_prefix('"') {
            Some(quoted) => unquote(quoted),
            None => {
                let end = after.find(';').unwrap_or(after.len());
                (after[..end].trim().to_owned(), &after[end..])
            }
        };
        if key.trim().eq_ignore_ascii_case(name) {
            return Some(value);
        }
        rest = remaining;
    }
}

/// Reads up to the closing quote. Clients escape a quote as `\"` or, browsers and httpx, as `%22`.
fn unquote(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (decode_form(&value), &text[at + 1..]),
            '\\' => match chars.next() {
                Some((_, next @ ('"' | '\\'))) => value.push(next),
                Some((_, next)) => value.extend(['\\', next]),
                None => {}
            },
            c => value.push(c),
        }
    }
    (decode_form(&value), "")
}

fn decode_form(value: &str) -> String {
    value.replace("%22", "\"").replace("%0D", "\r").replace("%0A", "\n")
}

impl Parser {
    pub fn new(boundary: &str) -> Parser {
        Parser {
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            // The first boundary has no line before it; pretend it has.
            buf: b"\r\n".to_vec(),
            state: State::Preamble,
        }
    }

    /// Takes more of the body and gives what can be told from it.
    pub fn push(&mut self, data: &[u8]) -> Result<Vec<Event>, String> {
        self.buf.extend_from_slice(data);
        let mut events = Vec::new();
        while self.step(&mut events)? {}
        Ok(events)
    }

    /// Whether the final boundary was seen.
    pub fn done(&self) -> bool {
        self.state == State::Done
    }

    /// Makes one step; false when more bytes are needed.
    fn step(&mut self, events: &mut Vec<Event>) -> Result<bool, String> {
        match self.state {
            State::Preamble | State::Data => {
                let in_part = self.state == State::Data;
                let found = find(&self.buf, &self.delimiter);
                // Without a delimiter, keep what may be the beginning of one.
                let keep = self.delimiter.len() - 1;
                let ready = found.unwrap_or(self.buf.len().saturating_sub(keep));
                if in_part && ready > 0 {
                    events.push(Event::Data(self.buf[..ready].to_vec()));
                }
                if found.is_none() {
                    self.buf.drain(..ready);
                    return Ok(false);
                }
                self.buf.drain(..ready + self.delimiter.len());
                if in_part {
                    events.push(Event::PartEnd);
                }
                self.state = State::Boundary;
            }
            State::Boundary => {
                if self.buf.starts_with(b"--") {
                    self.state = State::Done;
                    return Ok(true);
                }
                let Some(end) = find(&self.buf, b"\r\n") else {
                    return too_long(self.buf.len());
                };
                if !self.buf[..end].iter().all(|b| matches!(b, b' ' | b'\t')) {
                    return Err("malformed multipart boundary".into());
                }
                // Leaves the line end, so that an empty header section also ends with two.
                self.buf.drain(..end);
                self.state = State::Headers;
            }
            State::Headers => {
                let Some(end) = find(&self.buf, b"\r\n\r\n") else {
                    return too_long(self.buf.len());
                };
                let text = String::from_utf8_lossy(&self.buf[..end]).into_owned();
                self.buf.drain(..end + 4);
                self.begin(&text, events)?;
            }
            State::Done => {
                self.buf.clear();
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn begin(&mut self, headers: &str, events: &mut Vec<Event>) -> Result<(), String> {
        let value = headers.split("\r\n").find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
        });
        let Some((_, parameters)) = value.and_then(|v| v.split_once(';')) else {
            return Err("a multipart part has no Content-Disposition".into());
        };
        let name = parameter(parameters, "name").unwrap_or_default();
        let filename = parameter(parameters, "filename");
        events.push(Event::Part { name, filename });
        self.state = State::Data;
        Ok(())
    }
}

fn too_long(length: usize) -> Result<bool, String> {
    if length > MAX_HEADERS {
        return Err("multipart headers are too long".into());
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &[u8] = b"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a%22;b\"\r\n\
        Content-Type: text/plain\r\n\r\none\r\n--\r\n--B\r\ncontent-disposition: form-data; name=file; \
        filename=\"\\\"q\\\"\"\r\n\r\n\r\n--B--\r\n";

    fn run(chunk: usize) -> Vec<Event> {
        let mut parser = Parser::new("B");
        let mut events: Vec<Event> = Vec::new();
        for piece in BODY.chunks(chunk) {
            for event in parser.push(piece).unwrap() {
                match (events.last_mut(), event) {
                    (Some(Event::Data(all)), Event::Data(more)) => all.extend(more),
                    (_, event) => events.push(event),
                }
            }
        }
        assert!(parser.done());
        events
    }

    #[test]
    fn any_chunking_gives_the_same() {
        let part = |filename: &str| Event::Part { name: "file".into(), filename: Some(filename.into()) };
        let wanted = [
            part("a\";b"),
            Event::Data(b"one\r\n--".to_vec()),
            Event::PartEnd,
            part("\"q\""),
            Event::PartEnd,
        ];
        for chunk in 1..=BODY.len() {
            assert_eq!(run(chunk), wanted, "chunks of {chunk}");
        }
    }

    #[test]
    fn boundaries() {
        assert_eq!(boundary("multipart/form-data; boundary=\"a b\"").as_deref(), Some("a b"));
        assert_eq!(boundary("multipart/form-data; charset=x; Boundary=zz").as_deref(), Some("zz"));
        assert_eq!(boundary("multipart/mixed; boundary=a"), None);
    }

    #[test]
    fn rejects_garbage() {
        assert!(Parser::new("B").push(b"--Bx\r\n").is_err());
        assert!(Parser::new("B").push(b"--B\r\nX: y\r\n\r\n").is_err());
    }
}
