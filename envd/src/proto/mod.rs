//! Messages of `process.Process`; field numbers come from the descriptors in the `e2b` package.

mod json;

use bytes::Bytes;
use prost::{Message, Oneof};
use std::collections::HashMap;

#[derive(Clone, Copy, PartialEq, Message)]
pub struct Empty {}

#[derive(Clone, PartialEq, Message)]
pub struct ProcessConfig {
    #[prost(string, tag = "1")]
    pub cmd: String,
    #[prost(string, repeated, tag = "2")]
    pub args: Vec<String>,
    #[prost(map = "string, string", tag = "3")]
    pub envs: HashMap<String, String>,
    #[prost(string, optional, tag = "4")]
    pub cwd: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct Size {
    #[prost(uint32, tag = "1")]
    pub cols: u32,
    #[prost(uint32, tag = "2")]
    pub rows: u32,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct Pty {
    #[prost(message, optional, tag = "1")]
    pub size: Option<Size>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ProcessInfo {
    #[prost(message, optional, tag = "1")]
    pub config: Option<ProcessConfig>,
    #[prost(uint32, tag = "2")]
    pub pid: u32,
    #[prost(string, optional, tag = "3")]
    pub tag: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub processes: Vec<ProcessInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub struct StartRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessConfig>,
    #[prost(message, optional, tag = "2")]
    pub pty: Option<Pty>,
    #[prost(string, optional, tag = "3")]
    pub tag: Option<String>,
    #[prost(bool, optional, tag = "4")]
    pub stdin: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Selector {
    #[prost(oneof = "SelectorKind", tags = "1, 2")]
    pub selector: Option<SelectorKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum SelectorKind {
    #[prost(uint32, tag = "1")]
    Pid(u32),
    #[prost(string, tag = "2")]
    Tag(String),
}

/// `ConnectRequest`, `CloseStdinRequest` and `StreamInputRequest.StartEvent` all have this one field.
#[derive(Clone, PartialEq, Message)]
pub struct SelectRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<Selector>,
}

#[derive(Clone, PartialEq, Message)]
pub struct UpdateRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<Selector>,
    #[prost(message, optional, tag = "2")]
    pub pty: Option<Pty>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Input {
    #[prost(oneof = "InputKind", tags = "1, 2")]
    pub input: Option<InputKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum InputKind {
    #[prost(bytes = "bytes", tag = "1")]
    Stdin(Bytes),
    #[prost(bytes = "bytes", tag = "2")]
    Pty(Bytes),
}

#[derive(Clone, PartialEq, Message)]
pub struct SendInputRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<Selector>,
    #[prost(message, optional, tag = "2")]
    pub input: Option<Input>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SendSignalRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<Selector>,
    #[prost(int32, tag = "2")]
    pub signal: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct InputData {
    #[prost(message, optional, tag = "2")]
    pub input: Option<Input>,
}

#[derive(Clone, PartialEq, Message)]
pub struct StreamInputRequest {
    #[prost(oneof = "StreamInputEvent", tags = "1, 2, 3")]
    pub event: Option<StreamInputEvent>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum StreamInputEvent {
    #[prost(message, tag = "1")]
    Start(SelectRequest),
    #[prost(message, tag = "2")]
    Data(InputData),
    #[prost(message, tag = "3")]
    Keepalive(Empty),
}

/// `StartResponse` and `ConnectResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct EventResponse {
    #[prost(message, optional, tag = "1")]
    pub event: Option<ProcessEvent>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ProcessEvent {
    #[prost(oneof = "Event", tags = "1, 2, 3, 4")]
    pub event: Option<Event>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Event {
    #[prost(message, tag = "1")]
    Start(StartEvent),
    #[prost(message, tag = "2")]
    Data(DataEvent),
    #[prost(message, tag = "3")]
    End(EndEvent),
    #[prost(message, tag = "4")]
    Keepalive(Empty),
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct StartEvent {
    #[prost(uint32, tag = "1")]
    pub pid: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct DataEvent {
    #[prost(oneof = "Output", tags = "1, 2, 3")]
    pub output: Option<Output>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Output {
    #[prost(bytes = "bytes", tag = "1")]
    Stdout(Bytes),
    #[prost(bytes = "bytes", tag = "2")]
    Stderr(Bytes),
    #[prost(bytes = "bytes", tag = "3")]
    Pty(Bytes),
}

#[derive(Clone, PartialEq, Message)]
pub struct EndEvent {
    #[prost(sint32, tag = "1")]
    pub exit_code: i32,
    #[prost(bool, tag = "2")]
    pub exited: bool,
    #[prost(string, tag = "3")]
    pub status: String,
    #[prost(string, optional, tag = "4")]
    pub error: Option<String>,
}
