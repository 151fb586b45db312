//! The JSON form of the messages.

use super::*;
use crate::codec::{Decode, Encode, Obj, ObjWriter};

const SIGNALS: [(&str, i32); 3] = [("SIGNAL_UNSPECIFIED", 0), ("SIGNAL_SIGTERM", 15), ("SIGNAL_SIGKILL", 9)];

impl Decode for Empty {
    fn from_json(_: &Obj) -> Result<Self, String> {
        Ok(Empty {})
    }
}

impl Decode for ProcessConfig {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(ProcessConfig {
            cmd: o.str("cmd")?,
            args: o.strings("args")?,
            envs: o.string_map("envs")?,
            cwd: o.opt_str("cwd")?,
        })
    }
}

impl Decode for Size {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(Size { cols: o.u32("cols")?, rows: o.u32("rows")? })
    }
}

impl Decode for Pty {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(Pty { size: o.opt_message("size")? })
    }
}

impl Decode for StartRequest {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(StartRequest {
            process: o.opt_message("process")?,
            pty: o.opt_message("pty")?,
            tag: o.opt_str("tag")?,
            stdin: o.opt_bool("stdin")?,
        })
    }
}

impl Decode for Selector {
    fn from_json(o: &Obj) -> Result<Self, String> {
        let pid = o.opt_u32("pid")?.map(SelectorKind::Pid);
        let tag = o.opt_str("tag")?.map(SelectorKind::Tag);
        Ok(Selector { selector: pid.or(tag) })
    }
}

impl Decode for SelectRequest {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(SelectRequest { process: o.opt_message("process")? })
    }
}

impl Decode for UpdateRequest {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(UpdateRequest { process: o.opt_message("process")?, pty: o.opt_message("pty")? })
    }
}

impl Decode for Input {
    fn from_json(o: &Obj) -> Result<Self, String> {
        let stdin = o.opt_bytes("stdin")?.map(InputKind::Stdin);
        let pty = o.opt_bytes("pty")?.map(InputKind::Pty);
        Ok(Input { input: stdin.or(pty) })
    }
}

impl Decode for SendInputRequest {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(SendInputRequest { process: o.opt_message("process")?, input: o.opt_message("input")? })
    }
}

impl Decode for SendSignalRequest {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(SendSignalRequest {
            process: o.opt_message("process")?,
            signal: o.opt_enum("signal", &SIGNALS)?.unwrap_or_default(),
        })
    }
}

impl Decode for InputData {
    fn from_json(o: &Obj) -> Result<Self, String> {
        Ok(InputData { input: o.opt_message("input")? })
    }
}

impl Decode for StreamInputRequest {
    fn from_json(o: &Obj) -> Result<Self, String> {
        let start = o.opt_message("start")?.map(StreamInputEvent::Start);
        let data = o.opt_message("data")?.map(StreamInputEvent::Data);
        let keepalive = o.opt_message("keepalive")?.map(StreamInputEvent::Keepalive);
        Ok(StreamInputRequest { event: start.or(data).or(keepalive) })
    }
}

impl Encode for Empty {
    fn write_json(&self, out: &mut String) {
        out.push_str("{}");
    }
}

impl Encode for ProcessConfig {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        w.str("cmd", &self.cmd);
        w.strings("args", &self.args);
        w.string_map("envs", &self.envs);
        w.opt_str("cwd", self.cwd.as_deref());
        w.end();
    }
}

impl Encode for ProcessInfo {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        w.message("config", &self.config);
        w.int("pid", self.pid.into());
        w.opt_str("tag", self.tag.as_deref());
        w.end();
    }
}

impl Encode for ListResponse {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        w.messages("processes", &self.processes);
        w.end();
    }
}

impl Encode for EventResponse {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        w.message("event", &self.event);
        w.end();
    }
}

impl Encode for ProcessEvent {
    fn write_json(&self, out: &mut String) {
        let mut w = ObjWriter::new(out);
        match &self.event {
            None => {}
            Some(Event::Start(start)) => {
                let mut s = ObjWriter::new(w.key("start"));
                s.int("pid", start.pid.into());
                s.end();
            }
            Some(Event::Data(data)) => {
                let mut d = ObjWriter::new(w.key("data"));
                match &data.output {
                    None => {}
                    Some(Output::Stdout(b)) => d.bytes("stdout", b),
                    Some(Output::Stderr(b)) => d.bytes("stderr", b),
                    Some(Output::Pty(b)) => d.bytes("pty", b),
                }
                d.end();
            }
            Some(Event::End(end)) => {
                let mut e = ObjWriter::new(w.key("end"));
                e.int("exitCode", end.exit_code.into());
                e.bool("exited", end.exited);
                e.str("status", &end.status);
                e.opt_str("error", end.error.as_deref());
                e.end();
            }
            Some(Event::Keepalive(_)) => w.key("keepalive").push_str("{}"),
        }
        w.end();
    }
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use crate::codec::Codec;

    #[test]
    fn start_request_from_json() {
        let text = br#"{"process":{"cmd":"/bin/bash","args":["-l","-c","true"],"envs":{"A":"b"}},
            "stdin":false,"pty":{"size":{"cols":80,"rows":24}},"future":[1]}"#;
        let r: StartRequest = Codec::Json.decode(text).unwrap();
        let p = r.process.unwrap();
        assert_eq!((p.cmd.as_str(), p.args.len()), ("/bin/bash", 3));
        assert_eq!(p.envs["A"], "b");
        assert_eq!(r.stdin, Some(false));
        assert_eq!(r.pty.unwrap().size.unwrap().cols, 80);
    }

    #[test]
    fn proto_round_trip() {
        let request = SendSignalRequest {
            process: Some(Selector { selector: Some(SelectorKind::Tag("t".into())) }),
            signal: 9,
        };
        let data = request.encode_to_vec();
        assert_eq!(data, b"\x0a\x03\x12\x01t\x10\x09");
        assert_eq!(Codec::Proto.decode::<SendSignalRequest>(&data).unwrap(), request);
    }

    #[test]
    fn events_to_json() {
        let event = |e| EventResponse { event: Some(ProcessEvent { event: Some(e) }) };
        let end = event(Event::End(EndEvent {
            exit_code: -1,
            exited: false,
            status: "signal: killed".into(),
            error: Some("signal: killed".into()),
        }));
        let json = String::from_utf8(Codec::Json.encode(&end)).unwrap();
        assert_eq!(
            json,
            r#"{"event":{"end":{"exitCode":-1,"status":"signal: killed","error":"signal: killed"}}}"#
        );
        let data = event(Event::Data(DataEvent { output: Some(Output::Stderr("hi".into())) }));
        assert_eq!(Codec::Json.encode(&data), br#"{"event":{"data":{"stderr":"aGk="}}}"#);
    }
}
