//! State shared by all requests.

use crate::connect::RpcError;
use crate::filesystem::watchers::Watchers;
use crate::freezer::Freezer;
use crate::http::{json, Response};
use crate::metrics::CpuMeter;
use crate::process::table::Table;
use crate::reaper::Reaper;
use crate::users::{resolve, User};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[derive(Clone, Copy)]
pub struct Options {
    /// Running as the guest's init: the machine is ours to configure.
    pub pid1: bool,
    /// Whether envd may become other users.
    pub root: bool,
    /// Whether `/init` may set the clock.
    pub set_clock: bool,
}

/// What `/init` sets.
#[derive(Default)]
pub struct Settings {
    pub token: Option<String>,
    pub env: BTreeMap<String, String>,
    pub default_user: Option<String>,
    pub default_workdir: Option<String>,
    pub sandbox_id: Option<String>,
    pub template_id: Option<String>,
}

pub struct App {
    pub options: Options,
    pub reaper: Reaper,
    pub freezer: Freezer,
    pub processes: Table,
    pub watchers: Watchers,
    pub cpu: CpuMeter,
    settings: Mutex<Settings>,
}

impl App {
    pub fn new(options: Options, reaper: Reaper, freezer: Freezer) -> App {
        App {
            options,
            reaper,
            freezer,
            processes: Table::default(),
            watchers: Watchers::default(),
            cpu: CpuMeter::default(),
            settings: Mutex::default(),
        }
    }

    pub fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The named user, or the default: `/init`'s choice, else `user` where the image has one, else root. Without root
    /// privileges (development) it can only be the user that envd runs as.
    pub fn user(&self, name: Option<&str>) -> Result<User, RpcError> {
        if let Some(name) = name.filter(|n| !n.is_empty()) {
            return User::find(name);
        }
        let configured = self.settings().default_user.clone();
        match configured {
            Some(name) => User::find(&name),
            None if !self.options.root => User::current(),
            None => User::find("user").or_else(|_| User::find("root")),
        }
    }

    /// Resolves `path` for `user` (see [`resolve`]).
    pub fn resolve(&self, path: &str, user: &User) -> Result<String, String> {
        resolve(path, &user.home, self.settings().default_workdir.as_deref())
    }

    /// The environment of a command: defaults, then globals, then the request's.
    pub fn command_env<'a>(
        &self,
        user: &User,
        request: impl Iterator<Item = (&'a String, &'a String)>,
    ) -> BTreeMap<String, String> {
        let settings = self.settings();
        let mut env = BTreeMap::new();
        let mut set = |k: &str, v: &str| drop(env.insert(k.to_owned(), v.to_owned()));
        set("PATH", DEFAULT_PATH);
        set("HOME", &user.home);
        set("USER", &user.name);
        set("LOGNAME", &user.name);
        set("SHELL", &user.shell);
        if let Some(id) = &settings.sandbox_id {
            set("E2B_SANDBOX", "true");
            set("E2B_SANDBOX_ID", id);
        }
        if let Some(id) = &settings.template_id {
            set("E2B_TEMPLATE_ID", id);
        }
        for (k, v) in &settings.env {
            set(k, v);
        }
        for (k, v) in request {
            set(k, v);
        }
        env
    }

    pub fn envs_response(&self) -> Response {
        let settings = self.settings();
        json(serde_json::to_string(&settings.env).unwrap_or_default())
    }
}
