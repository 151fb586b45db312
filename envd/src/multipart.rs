//! Incremental `multipart/form-data` parser: bytes in, events out, no I/O. Contents are passed on without a copy.

use bytes::{Buf as _, Bytes, BytesMut};
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
    Data(Bytes),
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
    delimiter: Delimiter,
    /// What cannot be decided without more of the body: an unfinished header, or what may begin a delimiter.
    rest: Bytes,
    state: State,
}

/// CR LF `--` boundary, and how to find it.
///
/// Horspool's search reads one byte in as many as the delimiter has. Vector instructions, which a search otherwise
/// uses, are what an emulated processor is slowest at.
struct Delimiter {
    text: Vec<u8>,
    /// By the last byte of a window that does not match: how far the window moves.
    skip: [u8; 256],
}

impl Delimiter {
    fn new(boundary: &str) -> Delimiter {
        let text = format!("\r\n--{boundary}").into_bytes();
        let step = |n: usize| u8::try_from(n).unwrap_or(u8::MAX);
        let last = text.len() - 1;
        let mut skip = [step(text.len()); 256];
        for (at, byte) in text[..last].iter().enumerate() {
            skip[usize::from(*byte)] = step(last - at);
        }
        Delimiter { text, skip }
    }

    fn find(&self, data: &[u8]) -> Option<usize> {
        let (last, before) = self.text.split_last()?;
        let mut at = before.len();
        while let Some(byte) = data.get(at) {
            let start = at - before.len();
            if byte == last && data[start..at] == *before {
                return Some(start);
            }
            at += usize::from(self.skip[usize::from(*byte)]);
        }
        None
    }

    /// How many bytes at the end of `data`, which has no delimiter, may be the beginning of one.
    fn begun(&self, data: &[u8]) -> usize {
        let longest = data.len().min(self.text.len() - 1);
        (1..=longest).rev().find(|n| data.ends_with(&self.text[..*n])).unwrap_or(0)
    }
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

/// Reads up to the closing quote. Clients escape a quote as `\"` or, browsers and httpx, as `%22`, and line ends and
/// other control characters in that way, too.
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
    let mut parts = value.split('%');
    let mut decoded = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.get(..2).filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()));
        let code = digits.and_then(|d| u8::from_str_radix(d, 16).ok());
        match code.filter(|c| c.is_ascii_control() || *c == b'"') {
            Some(code) => {
                decoded.push(char::from(code));
                decoded.push_str(&part[2..]);
            }
            None => decoded.extend(["%", part]),
        }
    }
    decoded
}

impl Parser {
    pub fn new(boundary: &str) -> Parser {
        Parser {
            delimiter: Delimiter::new(boundary),
            // The first boundary has no line before it; pretend it has.
            rest: Bytes::from_static(b"\r\n"),
            state: State::Preamble,
        }
    }

    /// Takes more of the body and gives what can be told from it.
    pub fn push(&mut self, mut data: Bytes) -> Result<Vec<Event>, String> {
        if !self.rest.is_empty() {
            let mut joined = BytesMut::with_capacity(self.rest.len() + data.len());
            joined.extend_from_slice(&self.rest);
            joined.extend_from_slice(&data);
            data = joined.freeze();
        }
        let mut events = Vec::new();
        while self.step(&mut data, &mut events)? {}
        // A copy: a slice would keep all of the memory that it came in.
        self.rest = Bytes::copy_from_slice(&data);
        Ok(events)
    }

    /// Whether the final boundary was seen.
    pub fn done(&self) -> bool {
        self.state == State::Done
    }

    /// Makes one step, taking from `input` what it decided; false when more bytes are needed.
    fn step(&mut self, input: &mut Bytes, events: &mut Vec<Event>) -> Result<bool, String> {
        match self.state {
            State::Preamble | State::Data => {
                let in_part = self.state == State::Data;
                let found = self.delimiter.find(input);
                let ready = found.unwrap_or_else(|| input.len() - self.delimiter.begun(input));
                let content = input.split_to(ready);
                if in_part && !content.is_empty() {
                    events.push(Event::Data(content));
                }
                if found.is_none() {
                    return Ok(false);
                }
                input.advance(self.delimiter.text.len());
                if in_part {
                    events.push(Event::PartEnd);
                }
                self.state = State::Boundary;
            }
            State::Boundary => {
                if input.starts_with(b"--") {
                    self.state = State::Done;
                    return Ok(true);
                }
                let Some(end) = find(input, b"\r\n") else {
                    return too_long(input.len());
                };
                if !input[..end].iter().all(|b| matches!(b, b' ' | b'\t')) {
                    return Err("malformed multipart boundary".into());
                }
                // Leaves the line end, so that an empty header section also ends with two.
                input.advance(end);
                self.state = State::Headers;
            }
            State::Headers => {
                let Some(end) = find(input, b"\r\n\r\n") else {
                    return too_long(input.len());
                };
                let text = String::from_utf8_lossy(&input[..end]).into_owned();
                input.advance(end + 4);
                self.begin(&text, events)?;
            }
            State::Done => {
                input.clear();
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
            for event in parser.push(Bytes::copy_from_slice(piece)).unwrap() {
                match (events.last_mut(), event) {
                    (Some(Event::Data(all)), Event::Data(more)) => {
                        *all = [&all[..], &more[..]].concat().into()
                    }
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
            Event::Data(Bytes::from_static(b"one\r\n--")),
            Event::PartEnd,
            part("\"q\""),
            Event::PartEnd,
        ];
        for chunk in 1..=BODY.len() {
            assert_eq!(run(chunk), wanted, "chunks of {chunk}");
        }
    }

    #[test]
    fn delimiters_are_found_wherever_they_are() {
        for boundary in ["B", "aaab", "--\r\n--", &"long".repeat(100)] {
            let delimiter = Delimiter::new(boundary);
            for before in 0..300 {
                // Of the delimiter's own bytes, so that windows match in part.
                let own: Vec<u8> = delimiter.text.iter().rev().cycle().take(before).copied().collect();
                let text = [&own[..], &delimiter.text, b"x"].concat();
                assert_eq!(delimiter.find(&text), find(&text, &delimiter.text), "{boundary} after {before}");
                let cut = &text[..before + delimiter.text.len() - 1];
                if find(cut, &delimiter.text).is_none() {
                    assert!(delimiter.begun(cut) >= delimiter.text.len() - 1);
                }
            }
        }
    }

    #[test]
    fn escapes_of_browsers_and_httpx() {
        for (sent, wanted) in [
            ("%22a%0D%0a%09%", "\"a\r\n\t%"),
            ("100%.txt", "100%.txt"),
            ("%41%2F%zz%+1", "%41%2F%zz%+1"),
            ("%é", "%é"),
            ("", ""),
        ] {
            assert_eq!(decode_form(sent), wanted);
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
        let push = |body: &'static [u8]| Parser::new("B").push(Bytes::from_static(body));
        assert!(push(b"--Bx\r\n").is_err());
        assert!(push(b"--B\r\nX: y\r\n\r\n").is_err());
    }
}
