mod active;
mod engine;
mod header;
mod layer;
#[cfg(test)]
mod model_test;
mod system;

fn main() {}
